"""Seconds and successes of each attack of RejectAutoAttack, alone and in the chain, on small nets.

    python benchmarks/member_order.py

Trains each net for some seconds, attacks the first test images by the order of version 2 of the
ensemble and by that of today, and lists the images that only one of the two breaks. The order was
chosen on images of the cal split. Seconds are processor time.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import nn

from demur import TPR, AcceptedError, Energy, Linf, LoadedRun, recipe, resolve_thresholds, train
from demur.attacks import Attack, MinMargin, MultiTarget, RejectAutoAttackEnsemble
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import checked
from demur.attacks.autoattack import BROKEN_CLEAN, Chain
from demur.cli.app import main
from demur.rejectors import KNN, Con, Coupled, Rejector
from demur.spec.importing import allow_import

app = typer.Typer(add_completion=False)
STORED = Path(__file__).with_name("member-order-digits-cpu.json")
NET = "member_order:small_net"
CHANGES = ["epochs=12", f"net={NET}", "attack.steps=5", "validation_attack.steps=3"]
NETS: dict[str, Rejector | None] = {  # recipe and rejector; None is that of its head
    "digits-pgdat-rr": None, "digits-trades-rr": None, "digits-pgdat-ebd": None,
    "digits-pgdat-snet": None, "digits-pgdat-carl": None, "digits-ccat": Con(),
    "digits-trades": Con(), "digits-pgdat": Energy(), "digits-ccat-rr": KNN(),
    "digits-pgdat-rr seed=1": Coupled(),
}  # fmt: skip


def small_net() -> nn.Module:
    """Return two layers, whose gradient takes a twentieth of the time of a ResNet-8's."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def version_2(now: dict[str, Attack]) -> dict[str, Attack]:
    """Return the attacks before the change: their order, with more restarts and targets."""

    def twice(name: str) -> MultiTarget:
        member = now[name]
        assert isinstance(member, MultiTarget)
        inner: Any = member.attack
        return replace(member, targets=9, attack=replace(inner, restarts=2))

    names = ("product", "product-t", "balanced", "orthogonal", "closest", "balanced-t", "square")
    return {name: twice(name) if name.endswith("-t") else now[name] for name in names}


def measured(
    members: dict[str, Attack], criterion: AcceptedError, batch: AttackBatch
) -> tuple[dict[str, list[float]], list[int], int]:
    """Return seconds and successes by name, the broken images, and how many are broken clean."""
    chain = Chain(tuple(members.values()), criterion, rank_by=MinMargin(criterion))
    state, rows = chain.start(batch), dict[str, list[float]]()
    for number, name in enumerate(members):
        started = time.process_time()
        chain.advance(number, state.remaining(number), batch, state, stream=0)
        seconds = time.process_time() - started
        rows[name] = [round(seconds, 2), int((state.broken_by == number).sum())]
    broken = (state.broken_by >= 0).nonzero()[:, 0].tolist()
    return rows, broken, int((state.broken_by == BROKEN_CLEAN).sum())


def one_net(name: str, rejector: Rejector | None, n: int, eps: float, split: Any) -> dict[str, Any]:
    """Train a net and measure both orders on it."""
    allow_import(NET)
    known, *more = name.split()
    with TemporaryDirectory() as folder:
        loaded = LoadedRun(train(recipe(known, [*CHANGES, *more]), Path(folder) / "run"), "cpu")
        goal = AcceptedError(rejector or loaded.run.recipe.head_rejector[1], TPR(0.95))
        criterion = resolve_thresholds(goal, loaded.clean).spec
        x, y = loaded.splits[split].batch(slice(0, n))
        after = RejectAutoAttackEnsemble(Linf(eps), criterion).members()
        orders = {"before": version_2(after), "after": after}
        found: dict[str, Any] = {"rejector": str(goal.rejector)}
        broken = {}
        with checked(loaded.net, x, y) as (model, images, labels):
            batch = AttackBatch(model, images, labels, torch.arange(n), None)
            for order, members in orders.items():
                rows, broken[order], clean = measured(members, criterion, batch)
                for member, attack in members.items():
                    same = order == "after" and orders["before"][member] == attack
                    alone = (
                        found["before"]["members"][member][:2]
                        if same
                        else measured({member: attack}, criterion, batch)[0][member]
                    )
                    rows[member] = [*alone, *rows[member]]
                total = round(sum(row[2] for row in rows.values()), 1)
                found[order] = {"members": rows, "seconds": total, "broken": len(broken[order])}
        before, now = set(broken["before"]), set(broken["after"])
        lost, new = sorted(before - now), sorted(now - before)
    return found | {"clean": clean, "only_before": lost, "only_after": new}


@app.command()
def run(
    n: Annotated[int, typer.Option(help="Images.")] = 100,
    eps: Annotated[float, typer.Option(help="Radius of the Linf ball.")] = 0.12,
    split: Annotated[str, typer.Option(help="Whose images.")] = "test",
    only: Annotated[str, typer.Option(help="These nets, separated by commas.")] = "",
    store: Annotated[Path, typer.Option(help="Nets in this file are not measured again.")] = STORED,
) -> None:
    """Measure every net and print the totals."""
    torch.set_num_threads(1)
    columns = "seconds and broken images alone, then in the chain"
    report = {"n": n, "eps": eps, "split": split, "members": columns, "nets": {}}
    if store.exists():
        report = json.loads(store.read_text())
    nets = report["nets"]
    assert isinstance(nets, dict)
    for name in only.split(",") if only else NETS:
        if name not in nets:
            nets[name] = one_net(name, NETS[name], n, eps, split)
            store.write_text(json.dumps(report, separators=(",", ":")) + "\n")
        typer.echo(f"{name}: {json.dumps(nets[name])}")
    for order in ("before", "after"):
        seconds = sum(found[order]["seconds"] for found in nets.values())
        broken = sum(found[order]["broken"] for found in nets.values())
        typer.echo(f"{order}: {broken} of {len(nets)} x {n} images in {seconds:.0f} s")


if __name__ == "__main__":
    main(app)
