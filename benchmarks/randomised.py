"""Peer comparison on randomised nets: demur's version="rand" beside EOT-PGD and pyautoattack.

    python benchmarks/randomised.py --only "robust, random crop" -o randomised.json

Each result is the mean over 200 fresh passes on the returned images: the accuracy of a classifier,
the accepted errors of a rejector. Passes are forward passes per image; a gradient is one pass with
its backward pass. The file keeps the rows of other nets, so that nets can be run one by one.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demur import AcceptedError, Con, Digits, Linf, Misclassified, ModelScore
from demur.attacks import Criterion
from demur.attacks.autoattack import rand_chain
from demur.output import as_output
from peer_adapters import library
from randomised_nets import EPS, Counted, randomised_nets, rejecting_nets

PASSES = 200  # that judge every attack
Craft = Callable[[nn.Module, Tensor, Tensor], Tensor]


def ours(criterion: Criterion, restarts: int, passes: int) -> Craft:
    """Version "rand" with other numbers of restarts and judging passes."""
    full = rand_chain(Linf(EPS), criterion, seed=0, restarts=restarts)
    return type(full)(full.attacks, criterion, passes=passes)


def eot_pgd(objective: Callable[[Any, Tensor], Tensor], steps: int) -> Craft:
    """PGD with steps of eps/4 by the mean of 20 gradients."""

    def craft(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x_adv = (x + EPS * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
        for _ in range(steps):
            x_adv.requires_grad_()
            total = sum(objective(as_output(net(x_adv)), y).sum() for _ in range(20))
            (grad,) = torch.autograd.grad(torch.as_tensor(total), x_adv)
            x_adv = x_adv.detach() + EPS / 4 * grad.sign()
            x_adv = x_adv.clamp(x - EPS, x + EPS).clamp(0, 1)
        return x_adv

    return craft


def torchattacks_eot(steps: int) -> Craft:
    """EOT-PGD of torchattacks, 20 draws a step."""
    return lambda net, x, y: library("torchattacks").EOTPGD(
        net, eps=EPS, alpha=EPS / 4, steps=steps, eot_iter=20
    )(x, y)


def pyautoattack(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """AutoAttack's version "rand" in pyautoattack."""
    logging.disable()
    attack = library("pyautoattack").AutoAttack(net, eps=EPS, version="rand", seed=0)
    found = attack.run_standard_evaluation(x, y, batch_size=len(x))
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def negative_log_probability(out: Any, y: Tensor) -> Tensor:
    """Cross-entropy of each image."""
    return -torch.as_tensor(out.logits).log_softmax(-1).gather(1, y[:, None])[:, 0]


def wrong_log_probability(out: Any, y: Tensor) -> Tensor:
    """Log probability of the most likely wrong class: wrong and confident."""
    return torch.as_tensor(out.logits).log_softmax(-1).scatter(1, y[:, None], -1e9).amax(-1)


def attacks(criterion: Criterion) -> dict[str, Craft]:
    """Return the attacks that are compared, by name."""
    found = {
        "demur rand": ours(criterion, restarts=2, passes=100),
        "demur rand, 800 passes": ours(criterion, restarts=1, passes=48),
    }
    if isinstance(criterion, AcceptedError):
        return found | {
            "EOT-PGD 40 x 20": eot_pgd(wrong_log_probability, 40),
            "EOT-PGD 96 x 20": eot_pgd(wrong_log_probability, 96),
        }
    return found | {
        "EOT-PGD 40 x 20": eot_pgd(negative_log_probability, 40),
        "torchattacks EOT-PGD 40 x 20": torchattacks_eot(40),
        "torchattacks EOT-PGD 96 x 20": torchattacks_eot(96),
        "pyautoattack rand": pyautoattack,
    }


def mean_success(net: nn.Module, criterion: Criterion, x: Tensor, y: Tensor) -> float:
    """Return the share of successes over images and passes."""
    with torch.no_grad():
        found = [criterion(as_output(net(x)), y).double().mean() for _ in range(PASSES)]
    return float(torch.stack(found).mean())


def rows(name: str, net: nn.Module, criterion: Criterion, n: int) -> list[dict[str, Any]]:
    """Attack one net with every attack; return one row for each."""
    x, y = Digits().load()["test"].batch(slice(0, n))
    rejects = isinstance(criterion, AcceptedError)
    found = []
    for attack, craft in {"none": lambda _, x, y: x, **attacks(criterion)}.items():
        torch.manual_seed(0)
        counted, start = Counted(net), time.process_time()
        x_adv = craft(counted, x, y).detach()
        assert Linf(EPS).contains(x, x_adv).all(), f"{attack} leaves the ball"
        seconds = time.process_time() - start
        torch.manual_seed(1)
        success = mean_success(net, criterion, x_adv, y)
        result = {"accepted_errors": success} if rejects else {"accuracy": 1 - success}
        found.append(
            {
                "net": name,
                "attack": attack,
                "n": n,
                **result,
                "passes": counted.images / n,
                "seconds": seconds,
            }
        )
    return found


def markdown(found: list[dict[str, Any]], kind: str) -> str:
    """Return a table of one kind of result: a line for each net, a column for each attack."""
    chosen = [row for row in found if kind in row]
    names = list(dict.fromkeys(row["attack"] for row in chosen))
    lines = [f"| net | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for net in dict.fromkeys(row["net"] for row in chosen):
        cells = {row["attack"]: f"{row[kind]:.3f}" for row in chosen if row["net"] == net}
        lines.append(f"| {net} | {' | '.join(cells.get(name, '') for name in names)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the comparison for some nets and write or update the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names of the nets")
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("-o", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, tuple[nn.Module, Criterion]] = {
        name: (make(), Misclassified())
        for name, make in randomised_nets().items()
        if options.only in name
    }
    for name, (make, score, threshold) in rejecting_nets().items():
        if options.only in name:
            criterion = AcceptedError(Con() if score == "con" else ModelScore(), threshold)
            cases[name] = make(), criterion
    for name, case in cases.items():
        done = json.loads(options.o.read_text()) if options.o.exists() else []
        done = [row for row in done if row["net"] != name] + rows(name, *case, options.n)
        options.o.write_text(json.dumps(done, indent=1) + "\n")
    done = json.loads(options.o.read_text())
    tables = (markdown(done, kind) for kind in ("accuracy", "accepted_errors"))
    sys.stdout.write("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
