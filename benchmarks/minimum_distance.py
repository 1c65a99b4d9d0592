"""Minimum-distance attacks beside adv-lib's: found, found by a fresh pass, mean squared distance.

    python benchmarks/minimum_distance.py --model my_code:net --checkpoint weights.pt \
      --data cifar10 --n 500 --out minimum-distance.json
    python benchmarks/minimum_distance.py                      # a small CNN on digits

Both libraries get the same number of searches, steps and learning rate. A success counts if the
model, asked again at the given batch sizes with TF32 and without it, misclassifies the image each
time. Distances are compared on the images that both attacks break by that count.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demur.attacks import CW, FAB
from demur.attacks.balls import L2
from demur.audits.image_parts import as_batch, audit_images
from demur.audits.model_loading import load_model
from demur.data import Digits
from demur.numerics import device_by_name, tf32
from demur.output import as_output, prediction

Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]
BATCH_SIZES = (250, 64, 1)


def digits_net() -> nn.Module:
    """Return a small CNN trained on digits with Gaussian noise, in eval mode."""
    torch.manual_seed(0)
    x, y = Digits().load()["fit"].batch(slice(None))
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    adam = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(12):
        for rows in torch.randperm(len(y)).split(64):
            adam.zero_grad()
            noisy = x[rows] + 0.1 * torch.randn_like(x[rows])
            nn.functional.cross_entropy(net(noisy), y[rows]).backward()
            adam.step()
    return net.eval().requires_grad_(False)


def attacks(searches: int, steps: int, rate: float) -> dict[str, Attack]:
    """Return the attacks of both libraries by name, with one budget of gradient queries."""
    cw = CW("L2", searches=searches, steps=steps, rate=rate, constant=1.0)
    fab = FAB(L2(1e3), steps=steps, any_distance=True)
    found: dict[str, Attack] = {"demur, C&W": cw, "demur, FAB": fab}
    try:
        from adv_lib.attacks import carlini_wagner_l2, ddn  # type: ignore[import-not-found]
    except ImportError as error:
        sys.stderr.write(f"adv-lib is left out ({error}): pip install adv-lib\n")
        return found

    def peer(function: Any, **options: Any) -> Attack:
        return lambda net, x, y: function(net, x, y, **options)

    return found | {
        "adv-lib, C&W": peer(
            carlini_wagner_l2,
            max_iterations=steps,
            learning_rate=rate,
            initial_const=1.0,
            binary_search_steps=searches,
        ),
        "adv-lib, DDN": peer(ddn, steps=searches * steps, levels=None),
    }


def fresh_verdicts(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return which images are misclassified, for each batch size with TF32 and without it."""
    found = []
    with torch.no_grad():
        for precision in ("fp32", "tf32"):
            with tf32(precision):
                for size in BATCH_SIZES:
                    labels = [prediction(as_output(net(part))) for part in x.split(size)]
                    found.append(torch.cat(labels) != y)
    return found


def measure(net: nn.Module, x: Tensor, y: Tensor, attack: Attack, bs: int) -> dict[str, Any]:
    """Return what one attack finds: its own count, those of fresh passes, distances."""
    started = perf_counter()
    parts = [attack(net, *part) for part in zip(x.split(bs), y.split(bs), strict=True)]
    seconds, x_adv = perf_counter() - started, torch.cat(parts).detach()
    changed = (x_adv != x).flatten(1).any(1)
    verdicts = fresh_verdicts(net, x_adv, y)
    always = torch.stack(verdicts).all(0)
    return {
        "seconds": round(seconds, 1),
        "changed": int(changed.sum()),
        "fresh passes": [int(verdict[changed].sum()) for verdict in verdicts],
        "always": always.cpu().numpy(),
        "squared": (x_adv - x).flatten(1).double().square().sum(1).cpu().numpy(),
    }


def main() -> None:
    """Compare the attacks and write a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as in demur audit; default: a CNN trained on digits")
    parser.add_argument("--checkpoint")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--searches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--batch-size", type=int, default=250)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = device_by_name(args.device)
    net: Any = load_model(args.model, args.checkpoint) if args.model else digits_net()
    images, labels = as_batch(*audit_images(args.data, args.n)[0])
    x, y, net = images.to(device), labels.to(device), net.to(device)
    right = torch.cat([prediction(as_output(net(part))) for part in x.split(250)]) == y
    x, y = x[right], y[right]  # adv-lib attacks misclassified images as well
    found = {
        name: measure(net, x, y, attack, args.batch_size)
        for name, attack in attacks(args.searches, args.steps, args.rate).items()
    }
    shared = np.logical_and.reduce([part["always"] for part in found.values()])
    rows = {}
    for name, part in found.items():
        rows[name] = {
            "seconds": part["seconds"], "changed": part["changed"],
            "fresh passes": part["fresh passes"], "in every pass": int(part["always"].sum()),
            "mean squared distance": float(part["squared"][shared].mean()),
        }  # fmt: skip
        sys.stdout.write(f"{name:<14} {rows[name]}\n")
    report = {
        "n": len(y), "shared": int(shared.sum()), "device": str(device),
        "settings": {name: str(value) for name, value in vars(args).items()}, "attacks": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
