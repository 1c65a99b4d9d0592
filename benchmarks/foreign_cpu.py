"""AutoAttack on a small CNN of somebody else's code on a CPU: demur beside pyautoattack.

    python benchmarks/foreign_cpu.py -o benchmarks/foreign-cpu.json       # ten minutes on two cores
    python benchmarks/foreign_cpu.py --parts 1 --images 10 --members apgd-ce

The images are digits in colour of 32x32 pixels, made from scikit-learn's. The libraries attack one
part of the images after the other in turn, so that both see the same load of the machine. The
report has processor time beside wall time, which a busy host distorts.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from demur import AutoAttack, Digits, noise
from demur.data.dataset import SplitName
from foreign_nets import build, fit

EPS = 8 / 255
STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
SIDE = 32
CONTRAST = 0.35  # between a digit and its background


def colour_digits(split: SplitName, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return digits of faint random colours on noisy backgrounds, N, 3, 32, 32, and labels."""
    images = Digits().load()[split]
    x, y = images.batch(slice(0, count or len(images)))
    shape = interpolate(x, (SIDE, SIDE), mode="bilinear")
    index = torch.arange(len(x))
    paper = 0.2 + 0.4 * noise.uniform(0, index, 1, (3, 1, 1))
    ink = CONTRAST * (0.5 + noise.uniform(0, index, 2, (3, 1, 1)))
    grain = 0.1 * noise.uniform(0, index, 3, (3, SIDE, SIDE))
    return (paper + ink * shape + grain).clamp(0, 1), y


class Clock:
    """Wall and processor seconds by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Return what `work` returns."""
        wall, processor = time.perf_counter(), time.process_time()
        try:
            return work()
        finally:
            self.seconds[name][0] += time.perf_counter() - wall
            self.seconds[name][1] += time.process_time() - processor


def ours(
    model: nn.Module, members: list[str], engine: str, clock: Clock, x: Tensor, y: Tensor
) -> Tensor:
    """Return the adversarial examples of demur, with the time of each member."""
    ensemble = AutoAttack(
        model, eps=EPS, version="custom", attacks_to_run=members, verbose=False, engine=engine
    )
    standard = AutoAttack(model, eps=EPS, verbose=False).chain
    chosen = tuple(standard.attacks[STANDARD.index(name)] for name in members)
    object.__setattr__(ensemble.chain, "attacks", chosen)  # one restart, as in "standard"
    inner = ensemble._run
    ensemble._run = lambda member, *rest: clock.time(  # type: ignore[method-assign]
        f"{engine}, {members[member]}", lambda: inner(member, *rest)
    )
    found = ensemble.run_standard_evaluation(x, y, bs=len(x))
    assert isinstance(found, Tensor)
    return found


def theirs(model: nn.Module, members: list[str], clock: Clock, x: Tensor, y: Tensor) -> Tensor:
    """Return the adversarial examples of pyautoattack, with the time of each member."""
    from pyautoattack import AutoAttack as Theirs  # type: ignore[import-untyped]

    ensemble = Theirs(model, norm="Linf", eps=EPS, seed=0, version="standard", device="cpu")
    ensemble.attacks_to_run = members
    by_name = {
        "apgd-ce": ensemble.apgd, "apgd-t": ensemble.apgd_targeted, "fab-t": ensemble.fab,
        "square": ensemble.square,
    }  # fmt: skip
    for name, attack in by_name.items():
        perturb = attack.perturb
        attack.perturb = lambda *args, name=name, perturb=perturb: clock.time(
            f"pyautoattack, {name}", lambda: perturb(*args)
        )
    found: Tensor = ensemble.run_standard_evaluation(x, y, batch_size=len(x))[0]
    return found


@torch.no_grad()
def correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return which images the model classifies correctly, N, bool."""
    return torch.cat([model(part) for part in x.split(100)]).argmax(1) == y


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the report."""
    model = build("cnn", tiny=False)
    fit(model, *colour_digits("fit"), options.epochs, EPS, batch=64)
    x, y = colour_digits("test", options.parts * options.images)
    members, clock, verdicts = options.members.split(","), Clock(), defaultdict(list)
    say(f"{correct(model, x, y).float().mean():.1%} of {len(x)} clean images are correct")
    work: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        engine: partial(ours, model, members, engine, clock)
        for engine in options.engines.split(",")
    }
    work["pyautoattack"] = partial(theirs, model, members, clock)
    parts = zip(x.split(options.images), y.split(options.images), strict=True)
    for number, (images, labels) in enumerate(parts):
        for name, attack in work.items():
            x_adv = clock.time(name, partial(attack, images, labels))
            assert float((x_adv - images).abs().amax()) <= EPS + 1e-6
            verdicts[name].append(correct(model, x_adv, labels))
            spent = " ".join(f"{seconds:.1f}" for seconds in clock.seconds[name])
            say(f"part {number}, {name}: {spent} s so far, wall and processor")
    return report(options, clock, {name: torch.cat(parts) for name, parts in verdicts.items()})


def report(
    options: argparse.Namespace, clock: Clock, verdicts: dict[str, Tensor]
) -> dict[str, Any]:
    """Return seconds, ratios and different verdicts."""
    peer = verdicts["pyautoattack"]
    rows: dict[str, Any] = {
        name: dict(zip(("wall", "processor"), (round(s, 2) for s in spent), strict=True))
        for name, spent in sorted(clock.seconds.items())
    }
    for name, own in verdicts.items():
        rows[name]["robust"] = int(own.sum())
        if name == "pyautoattack":
            continue
        rows[name]["only_ours_breaks"] = int((~own & peer).sum())
        rows[name]["only_theirs_breaks"] = int((own & ~peer).sum())
        for kind in ("wall", "processor"):
            rows[name][f"times_{kind}"] = round(rows["pyautoattack"][kind] / rows[name][kind], 2)
    shown = {key: value for key, value in vars(options).items() if key != "output"}
    return {"torch": torch.__version__, "options": shown,
            "seconds": rows}  # fmt: skip


def say(sentence: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


def main() -> None:
    """Read the options, measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--images", type=int, default=100, help="images of a part")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--members", default=",".join(STANDARD))
    parser.add_argument("--engines", default="auto,plain")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    logging.getLogger("auto-attack").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    result = measure(options)
    say(json.dumps(result["seconds"], indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
