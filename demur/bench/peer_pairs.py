"""Our attacks, each with its counterparts in other libraries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from demur.attacks import (
    APGD,
    DLR,
    FAB,
    PGD,
    Attack,
    AutoAttackEnsemble,
    MultiTarget,
    Square,
    TargetedDLR,
)
from demur.bench.peer_adapters import (
    Adapter,
    PeerSetup,
    foolbox_cw,
    foolbox_pgd,
    pyautoattack_as_it_comes,
    pyautoattack_fab,
    pyautoattack_member,
    pyautoattack_standard,
    torchattacks_apgd,
    torchattacks_cw,
    torchattacks_fab,
    torchattacks_pgd,
)
from demur.errors import BadInput, suggestion

Distance = Literal["Linf", "squared L2"]


@dataclass(frozen=True)
class Pair:
    """An attack of ours and those it is compared with, by the library they come from.

    Behind a comma stands how the library is used, where it is compared in two ways.

    A `distance` is what attacks that look for the closest image keep small; what they find within
    the ball is broken, and where the distance is of another norm, whatever they find.
    """

    ours: Callable[[PeerSetup], Attack]
    peers: Mapping[str, Adapter]
    distance: Distance | None = None


def _pgd(steps: int) -> Pair:
    return Pair(
        lambda on: PGD(on.ball, steps=steps, step_size=on.step),
        {"foolbox": foolbox_pgd(steps), "torchattacks": torchattacks_pgd(steps)},
    )


def _member(name: str, ours: Callable[[PeerSetup], Attack], **more: Adapter) -> Pair:
    """A member of AutoAttack by itself; torchattacks' descend from the same code."""
    return Pair(ours, {"pyautoattack": pyautoattack_member(name), **more})


def _at_each(attack: Attack, on: PeerSetup) -> MultiTarget:
    return MultiTarget(attack, targets=on.targets, keep="success")


PAIRS: dict[str, Pair] = {
    "pgd-10": _pgd(10),
    "pgd-100": _pgd(100),
    "apgd-ce": _member(
        "apgd-ce",
        lambda on: APGD(on.ball, steps=on.steps),
        torchattacks=torchattacks_apgd("ce"),
    ),
    "apgd-dlr": _member(
        "apgd-dlr",
        lambda on: APGD(on.ball, steps=on.steps, objective=DLR()),
        torchattacks=torchattacks_apgd("dlr"),
    ),
    "apgd-t": _member(
        "apgd-t", lambda on: _at_each(APGD(on.ball, steps=on.steps, objective=TargetedDLR()), on)
    ),
    "fab": Pair(
        lambda on: FAB(on.ball, steps=on.steps, any_distance=True),
        {"pyautoattack": pyautoattack_fab, "torchattacks": torchattacks_fab},
        distance="Linf",
    ),
    "fab-t": _member("fab-t", lambda on: _at_each(FAB(on.ball, steps=on.steps), on)),
    "square": _member("square", lambda on: Square(on.ball, queries=on.queries)),
    # torchattacks has one whose members take 10 steps: nothing to compare with
    "autoattack": Pair(
        lambda on: AutoAttackEnsemble(on.ball),
        {
            "pyautoattack": pyautoattack_standard,
            "pyautoattack, as it comes": pyautoattack_as_it_comes,
        },
    ),
    "cw-l2": Pair(
        lambda on: on.cw,
        {"foolbox": foolbox_cw, "torchattacks": torchattacks_cw},
        distance="squared L2",
    ),
}


def pairs_by_name(names: tuple[str, ...]) -> dict[str, Pair]:
    """Some of the pairs, or all where none is named."""
    for name in names:
        if name not in PAIRS:
            raise BadInput(f"no attack to compare is called {name!r}; {suggestion(name, PAIRS)}")
    return {name: PAIRS[name] for name in names or PAIRS}
