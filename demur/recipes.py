"""Recipes: everything that decides a training run, and the names people type.

recipe("digits-pgdat-rr", ["epochs=20", "head.weight=0.5"])
attack("pgd-20:eps=0.2,restarts=5", Digits())
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Literal, TypeVar

from demur.attacks import (
    ATTACKS,
    CRITERIA,
    GOALS,
    PGD,
    Attack,
    Clean,
    EachTarget,
    Evade,
    FrankWolfe,
    Relaxed,
    Slips,
    Toward,
    Xi,
)
from demur.balls import L2, Linf
from demur.calibrate import OPERATING_POINTS, TPR
from demur.data import (
    AUGMENTS,
    CIFAR10,
    CIFAR100,
    DATASETS,
    Augment,
    CropFlip,
    Dataset,
    Digits,
    SplitName,
    Unchanged,
)
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
    Piecewise,
    Plain,
    Schedule,
    Standard,
)
from demur.nets import NETS, NetSpec, ResNet18, Small, WideResNet
from demur.precision import Precision
from demur.rejectors import READ_OFF, REJECTORS, Con, Rejector, learned_from
from demur.spec import Spec, Vocabulary, edit, later, read

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
    precision: Precision = field(default="fp32", metadata=later(neutral="fp32"))
    choose: Literal["val", "test", "last"] | None = field(default=None, metadata=later(None))

    @property
    def chosen_on(self) -> SplitName | None:
        """The split that chooses the epoch; None where the last is taken."""
        if self.choose is None:
            return "val" if "val" in self.data.splits else None
        return None if self.choose == "last" else self.choose

    def rejectors(self) -> dict[str, Rejector]:
        """What the trained net can be scored with: confidence, the head's own, and the rest."""
        own = self.method.head.rejectors()
        return {"Con": Con(), **own, **READ_OFF, **learned_from(self.data)}


def _linf(data: Dataset, steps: int) -> PGD:
    return PGD(Linf(data.threat.linf), steps=steps, step=data.threat.linf_step)


def _l2(data: Dataset, steps: int) -> PGD:
    return PGD(L2(data.threat.l2), steps=steps, step=data.threat.l2_step)


def _adaptive(recipe: "Recipe") -> PGD:
    """PGD that is wrong and trusted by the head's own score, kept by what gets past it."""
    own = next(iter(recipe.method.head.rejectors().values()), Con())
    return replace(
        _linf(recipe.data, 50), goal=Evade(own, eta=0.1), keep="criterion",
        criterion=Slips(own, TPR(0.95)),
    )  # fmt: skip


def _xi(recipe: "Recipe") -> PGD:
    """PGD that takes A away from A*, at the temperature that A was trained for."""
    head = recipe.method.head
    return replace(_linf(recipe.data, 50), goal=Xi(head.tau if isinstance(head, RR) else 1.0))


def _gama_pgd(recipe: Recipe) -> PGD:
    """The authors' constants; broken by any iterate, where theirs looks at the last."""
    eps = recipe.data.threat.linf
    return PGD(
        Linf(eps), steps=100, step=2 * eps, restarts=5, start="signs", goal=Relaxed(),
        keep="criterion", drops=(60, 85),
    )  # fmt: skip


def _gama_fw(recipe: Recipe) -> FrankWolfe:
    """The authors' constants; the same departure."""
    return FrankWolfe(
        Linf(recipe.data.threat.linf), steps=100, restarts=5, start="signs", goal=Relaxed(),
        keep="criterion", drops=(60, 85), factor=0.2,
    )  # fmt: skip


NAMED_ATTACKS: dict[str, Callable[[Recipe], Attack]] = {
    "clean": lambda recipe: Clean(),
    "pgd-10": lambda recipe: _linf(recipe.data, 10),
    "pgd-20": lambda recipe: _linf(recipe.data, 20),
    "pgd-100": lambda recipe: _linf(recipe.data, 100),
    "pgd-500": lambda recipe: _linf(recipe.data, 500),
    "pgd-1000": lambda recipe: _linf(recipe.data, 1000),
    "pgd-10-l2": lambda recipe: _l2(recipe.data, 10),
    "pgd-100-l2": lambda recipe: _l2(recipe.data, 100),
    "adaptive": _adaptive,
    "multi-target": lambda recipe: EachTarget(
        replace(_linf(recipe.data, 100), goal=Toward(), restarts=20)
    ),
    "gama-pgd": _gama_pgd,
    "gama-fw": _gama_fw,
    "xi": _xi,
}


def _digits(method: Method) -> Recipe:
    return Recipe(Digits(), Small(), method, OneCycle(0.3), epochs=24, judge=_linf(Digits(), 10))


# crafted a little beyond the radius of the attacks to come, which so few images need
_DIGITS_PGDAT = PGDAT(replace(_linf(Digits(), 10), ball=Linf(0.17)))

_METHODS = {
    "standard": Method(Standard(), Plain()),
    "pgdat": Method(PGDAT(), Plain()),
    "pgdat-rr": Method(PGDAT(), RR()),
}
_CIFARS: dict[str, Dataset] = {"cifar10": CIFAR10(), "cifar100": CIFAR100()}
_NETS: dict[str, NetSpec] = {"": ResNet18(), "-wrn": WideResNet()}


def _cifar(data: Dataset, net: NetSpec, method: Method) -> Recipe:
    """The paper's 110 epochs; bf16 is ours."""
    return Recipe(
        data, net, method, Piecewise(0.1), epochs=110, augment=CropFlip(), judge=_linf(data, 10),
        precision="bf16",
    )  # fmt: skip


def _short(recipe: Recipe) -> Recipe:
    """A third of the epochs, for almost the same robustness."""
    # reference code: running statistics move with every look of the attack, eleven times a batch,
    # so that two thirds of what a net is tested with come from the very last batch; not here
    frame = recipe.method.frame
    frame = replace(frame, bn="batch") if isinstance(frame, PGDAT) else frame
    method = replace(recipe.method, frame=frame)
    return replace(recipe, method=method, epochs=36, schedule=OneCycle(0.2))


_PAPER: dict[str, Recipe] = {
    f"{data}-{method}{net}": _cifar(_CIFARS[data], _NETS[net], _METHODS[method])
    for data in _CIFARS
    for method in _METHODS
    for net in _NETS
}

RECIPES: dict[str, Recipe] = {
    "digits-standard": _digits(Method(Standard(), Plain())),
    "digits-pgdat": _digits(Method(_DIGITS_PGDAT, Plain())),
    "digits-pgdat-rr": _digits(Method(_DIGITS_PGDAT, RR())),
    **_PAPER,
    **{f"{name}-short": _short(recipe) for name, recipe in _PAPER.items()},
}

_LISTS: tuple[tuple[type[Spec], ...], ...] = (
    (Linf, L2, Recipe, Method), DATASETS, AUGMENTS, NETS, ATTACKS, GOALS, CRITERIA, REJECTORS,
    OPERATING_POINTS, FRAMES, HEADS, SCHEDULES,
)  # fmt: skip

VOCABULARY: Vocabulary = {cls.__name__: cls for group in _LISTS for cls in group}


def recipe(name: str, changes: Iterable[str] = ()) -> Recipe:
    """A named recipe, or one in an @file, with `key=value` changes."""
    if name.startswith("@"):
        found = recipe_in(Path(name[1:]))
    elif name in RECIPES:
        found = RECIPES[name]
    else:
        raise BadInput(f"no recipe is called {name!r}; {suggestion(name, RECIPES)}")
    return reduce(_changed, changes, found)


def attack(text: str, recipe: Recipe) -> Attack:
    """The attack that `name:key=value,...` or an @file means for a run of this recipe."""
    name, _, changes = text.partition(":")
    if name.startswith("@"):
        held = _from_file(Path(name[1:]))
        if not isinstance(held, Attack):
            raise BadInput(f"{name[1:]} does not hold an attack")
        found = held
    elif name in NAMED_ATTACKS:
        found = NAMED_ATTACKS[name](recipe)
    else:
        raise BadInput(f"no attack is called {name!r}; {suggestion(name, NAMED_ATTACKS)}")
    return reduce(_changed, _parts(changes), found)


def recipe_in(path: Path) -> Recipe:
    """The recipe that a file holds."""
    held = _from_file(path)
    if not isinstance(held, Recipe):
        raise BadInput(f"{path} does not hold a recipe")
    return held


def _parts(changes: str) -> list[str]:
    """The changes between commas that stand outside all brackets."""
    parts, depth = [""], 0
    for letter in changes:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _changed(spec: S, change: str) -> S:
    key, equals, text = change.partition("=")
    if not equals or not key or not text:
        raise BadInput(f"{change!r} is not a change; write key=value")
    changed: S = edit(spec, key.strip(), text.strip(), VOCABULARY)
    return changed


def _from_file(path: Path) -> Spec:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; @FILE names a file that holds a spec")
    try:
        found: Spec = read(path.read_text(encoding="utf-8"), VOCABULARY)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not a text file") from None
    except BadInput as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    return found
