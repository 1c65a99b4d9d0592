"""Recipes: everything that decides a training run, and the names people type.

recipe("digits-pgdat-rr", ["epochs=20", "head.weight=0.5"])
attack("pgd-20:eps=0.2,restarts=5", Digits())
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TypeVar

from demur.attacks import ATTACKS, CRITERIA, GOALS, PGD, Attack, Clean, Evade, Slips
from demur.balls import L2, Linf
from demur.calibrate import OPERATING_POINTS, TPR
from demur.data import AUGMENTS, DATASETS, Augment, Dataset, Digits, Unchanged
from demur.declared import Count, Natural, NonNegative, Share
from demur.errors import BadInput, suggestion
from demur.methods import (
    FRAMES,
    HEADS,
    PGDAT,
    RR,
    SCHEDULES,
    Method,
    OneCycle,
    Plain,
    Schedule,
    Standard,
)
from demur.nets import NETS, NetSpec, Small
from demur.rejectors import REJECTORS, Con, Coupled, Energy, RCon, Rejector
from demur.spec import Spec, Vocabulary, edit, read

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True)
class Recipe(Spec):
    """A training run: data, net, method, and how long and how fast it learns."""

    data: Dataset
    net: NetSpec
    method: Method
    schedule: Schedule
    epochs: Count
    batch_size: Count = 128
    momentum: Share = 0.9
    weight_decay: NonNegative = 5e-4  # on every parameter, batch norm and biases too
    augment: Augment = Unchanged()
    judge: Attack = Clean()  # the val accuracy that chooses the epoch is under this attack
    seed: Natural = 0


def _digits(method: Method) -> Recipe:
    radius = Digits.threat.linf
    return Recipe(
        Digits(), Small(), method, OneCycle(0.3), epochs=18, judge=PGD(Linf(radius), steps=10),
    )  # fmt: skip


_DIGITS_PGD = PGDAT(PGD(Linf(Digits.threat.linf), steps=10))

RECIPES: dict[str, Recipe] = {
    "digits-standard": _digits(Method(Standard(), Plain())),
    "digits-pgdat": _digits(Method(_DIGITS_PGD, Plain())),
    "digits-pgdat-rr": _digits(Method(_DIGITS_PGD, RR())),
}

NAMED_ATTACKS: dict[str, Callable[[Dataset], Attack]] = {
    "clean": lambda data: Clean(),
    "pgd-10": lambda data: PGD(Linf(data.threat.linf), steps=10),
    "pgd-20": lambda data: PGD(Linf(data.threat.linf), steps=20),
    "pgd-100": lambda data: PGD(Linf(data.threat.linf), steps=100),
    "pgd-10-l2": lambda data: PGD(L2(data.threat.l2), steps=10),
    "pgd-100-l2": lambda data: PGD(L2(data.threat.l2), steps=100),
    "adaptive-rcon": lambda data: PGD(
        Linf(data.threat.linf), steps=50, goal=Evade(RCon(), eta=0.1),
        keep="criterion", criterion=Slips(RCon(), TPR(0.95)),
    ),
}  # fmt: skip

NAMED_REJECTORS: dict[str, Rejector] = {
    "Con": Con(),
    "R-Con": RCon(),
    "Energy": Energy(),
    "Con+R-Con": Coupled(),
}

_LISTS: tuple[tuple[type[Spec], ...], ...] = (
    (Linf, L2, Recipe, Method), DATASETS, AUGMENTS, NETS, ATTACKS, GOALS, CRITERIA, REJECTORS,
    OPERATING_POINTS, FRAMES, HEADS, SCHEDULES,
)  # fmt: skip

VOCABULARY: Vocabulary = {cls.__name__: cls for group in _LISTS for cls in group}


def recipe(name: str, changes: Iterable[str] = ()) -> Recipe:
    """A named recipe, or one in an @file, with `key=value` changes."""
    if name.startswith("@"):
        held = _from_file(name)
        if not isinstance(held, Recipe):
            raise BadInput(f"{name[1:]} does not hold a Recipe")
        found = held
    elif name in RECIPES:
        found = RECIPES[name]
    else:
        raise BadInput(f"no recipe is called {name!r}; {suggestion(name, RECIPES)}")
    return reduce(_changed, changes, found)


def attack(text: str, data: Dataset) -> tuple[str, Attack]:
    """The short name and the attack that `name:key=value,...` or an @file means for this data."""
    name, _, changes = text.partition(":")
    if name.startswith("@"):
        held = _from_file(name)
        if not isinstance(held, Attack):
            raise BadInput(f"{name[1:]} does not hold an attack")
        found, name = held, Path(name[1:]).stem
    elif name in NAMED_ATTACKS:
        found = NAMED_ATTACKS[name](data)
    else:
        raise BadInput(f"no attack is called {name!r}; {suggestion(name, NAMED_ATTACKS)}")
    return name, reduce(_changed, filter(None, changes.split(",")), found)


def _changed(spec: S, change: str) -> S:
    key, equals, text = change.partition("=")
    if not equals or not key or not text:
        raise BadInput(f"{change!r} is not a change; write key=value")
    changed: S = edit(spec, key, text, VOCABULARY)
    return changed


def _from_file(name: str) -> Spec:
    path = Path(name[1:])
    if not path.is_file():
        raise BadInput(f"there is no file {path}; @FILE names a file that holds a spec")
    found: Spec = read(path.read_text(), VOCABULARY)
    return found
