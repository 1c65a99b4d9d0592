"""demur's attacks, each paired with its counterparts in other libraries."""

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
    """An attack of demur and the peers it is compared with.

    Attributes:
        ours: demur's attack for a setup.
        peers: Adapters by library; a comma and a remark follow if a library is used in two ways.
        distance: The norm that a minimum-distance attack minimises, None for other attacks. Such
            an attack may leave the ball: a "Linf" image then counts as not broken, a "squared L2"
            image counts at any distance.
    """

    ours: Callable[[PeerSetup], Attack]
    peers: Mapping[str, Adapter]
    distance: Distance | None = None


def _pgd(steps: int) -> Pair:
    return Pair(
        lambda setup: PGD(setup.ball, steps=steps, step_size=setup.step),
        {"foolbox": foolbox_pgd(steps), "torchattacks": torchattacks_pgd(steps)},
    )


def _member(name: str, ours: Callable[[PeerSetup], Attack], **more: Adapter) -> Pair:
    """A single member of AutoAttack; torchattacks' versions descend from the same code."""
    return Pair(ours, {"pyautoattack": pyautoattack_member(name), **more})


def _multi_target(attack: Attack, setup: PeerSetup) -> MultiTarget:
    return MultiTarget(attack, targets=setup.targets, keep="success")


PAIRS: dict[str, Pair] = {
    "pgd-10": _pgd(10),
    "pgd-100": _pgd(100),
    "apgd-ce": _member(
        "apgd-ce",
        lambda setup: APGD(setup.ball, steps=setup.steps),
        torchattacks=torchattacks_apgd("ce"),
    ),
    "apgd-dlr": _member(
        "apgd-dlr",
        lambda setup: APGD(setup.ball, steps=setup.steps, objective=DLR()),
        torchattacks=torchattacks_apgd("dlr"),
    ),
    "apgd-t": _member(
        "apgd-t",
        lambda setup: _multi_target(
            APGD(setup.ball, steps=setup.steps, objective=TargetedDLR()), setup
        ),
    ),
    "fab": Pair(
        lambda setup: FAB(setup.ball, steps=setup.steps, any_distance=True),
        {"pyautoattack": pyautoattack_fab, "torchattacks": torchattacks_fab},
        distance="Linf",
    ),
    "fab-t": _member(
        "fab-t", lambda setup: _multi_target(FAB(setup.ball, steps=setup.steps), setup)
    ),
    "square": _member("square", lambda setup: Square(setup.ball, queries=setup.queries)),
    # torchattacks' AutoAttack takes 10 steps per member, so it is not comparable
    "autoattack": Pair(
        lambda setup: AutoAttackEnsemble(setup.ball),
        {
            "pyautoattack": pyautoattack_standard,
            "pyautoattack, as it comes": pyautoattack_as_it_comes,
        },
    ),
    "cw-l2": Pair(
        lambda setup: setup.cw,
        {"foolbox": foolbox_cw, "torchattacks": torchattacks_cw},
        distance="squared L2",
    ),
}


def pairs_by_name(names: tuple[str, ...]) -> dict[str, Pair]:
    """The pairs with these names, or all pairs if there are none."""
    for name in names:
        if name not in PAIRS:
            raise BadInput(f"there is no attack {name!r} to compare; {suggestion(name, PAIRS)}")
    return {name: PAIRS[name] for name in names or PAIRS}
