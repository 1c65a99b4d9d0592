"""Named attacks, as functions of the recipe of the attacked net."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

from demur.attacks import (
    APGD,
    ATTACKS,
    CE,
    CW,
    GAMA,
    PGD,
    AcceptedError,
    Attack,
    AutoAttackEnsemble,
    Clean,
    ForceRejectionEnsemble,
    FrankWolfe,
    HopSkipJump,
    MarginProduct,
    MinMargin,
    MultiTarget,
    Objective,
    PlusLogScore,
    RayS,
    RejectAutoAttackEnsemble,
    ScoreObjective,
    TargetedConfidence,
    TargetedMargin,
    WorstScore,
    WrongConfidence,
    XiObjective,
)
from demur.attacks.balls import L1, L2, Linf
from demur.calibrate import TPR, Median
from demur.data import Dataset
from demur.data.corruptions import CORRUPTIONS
from demur.errors import BadInput
from demur.recipes.training import Recipe, l2, linf
from demur.spec import find_name, required_fields

V = TypeVar("V")
STEPS, RESTARTS = 500, 10  # the paper's


@dataclass(frozen=True)
class AdaptiveObjective:
    """base_objective + eta * rejector_term: misclassification plus a term for the rejector."""

    base_objective: CE | WrongConfidence | TargetedConfidence
    rejector_term: Literal["log-score", "score", "rr"]

    def objective(self, recipe: Recipe, eta: float) -> Objective:
        _, rejector = recipe.head_rejector
        if self.rejector_term == "log-score":
            return PlusLogScore(rejector, eta, self.base_objective)
        return self.base_objective + eta * (
            ScoreObjective(rejector) if self.rejector_term == "score" else rr_loss(recipe)
        )

    def attack(
        self, recipe: Recipe, eta: float = 1.0, steps: int = STEPS, restarts: int = RESTARTS,
        criterion: AcceptedError | None = None,
    ) -> Attack:  # fmt: skip
        """PGD on this objective; a targeted one runs against every wrong class.

        It keeps examples that succeed by the criterion; None keeps those with the largest
        objective, as in the paper.
        """
        pgd = replace(
            linf(recipe.data, steps), restarts=restarts, objective=self.objective(recipe, eta)
        )
        if criterion is not None:
            pgd = replace(pgd, keep="success", criterion=criterion)
        if not isinstance(self.base_objective, TargetedConfidence):
            return pgd
        if criterion is not None:
            return MultiTarget(
                pgd, keep="success", rank_by=MinMargin(criterion), criterion=criterion
            )
        return MultiTarget(
            pgd, rank_by=replace(self, base_objective=WrongConfidence()).objective(recipe, eta)
        )


def rr_loss(recipe: Recipe) -> Objective:
    """L_RR with the options that A was trained with; raises BadInput without an RR head."""
    objective = recipe.method.head.attack_objective()
    if objective is None:
        raise BadInput("L_RR needs a net whose auxiliary output was trained by it; use head=RR()")
    return objective


ADAPTIVE_OBJECTIVES: dict[str, AdaptiveObjective] = {
    "ce-log-score": AdaptiveObjective(CE(), "log-score"),
    "ce-rr": AdaptiveObjective(CE(), "rr"),
    "con-rr": AdaptiveObjective(WrongConfidence(), "rr"),
    "con-log-score": AdaptiveObjective(WrongConfidence(), "log-score"),
    "targets-rr": AdaptiveObjective(TargetedConfidence(), "rr"),
    "ce-score": AdaptiveObjective(CE(), "score"),
}
ADAPTIVE_ATTACKS = {f"adaptive-{name}": made for name, made in ADAPTIVE_OBJECTIVES.items()}


def _pgd(make: Callable[[Dataset, int], PGD], steps: int, recipe: Recipe) -> Attack:
    return make(recipe.data, steps)


def _adaptive(recipe: Recipe) -> PGD:
    """PGD on CE + 0.1 log score of the head's rejector; keeps accepted errors."""
    _, rejector = recipe.head_rejector
    return replace(
        linf(recipe.data, 50), objective=PlusLogScore(rejector, eta=0.1), keep="success",
        criterion=AcceptedError(rejector, TPR(0.95)),
    )  # fmt: skip


def _adaptive_apgd(recipe: Recipe) -> APGD:
    """Auto-PGD on the product of the misclassification and acceptance margins, without a weight."""
    criterion = AcceptedError(recipe.head_rejector[1], TPR(0.95))
    return APGD(
        Linf(recipe.data.threat.linf), objective=MarginProduct(criterion), criterion=criterion
    )


def _xi(recipe: Recipe) -> PGD:
    """PGD on |A - A*|, at the temperature that A was trained with."""
    if not recipe.has_rectifier:
        raise BadInput("xi needs a net with R-Con = con * A; train with head=RR()")
    return replace(linf(recipe.data, 50), objective=XiObjective(recipe.tau))


def _gama_pgd(recipe: Recipe) -> PGD:
    """GAMA-PGD with the authors' constants; any iterate may succeed, theirs tests the last one."""
    eps = recipe.data.threat.linf
    return PGD(
        Linf(eps), steps=100, step_size=2 * eps, restarts=5, start="signs", objective=GAMA(),
        keep="success", decay_steps=(60, 85),
    )  # fmt: skip


def _gama_fw(recipe: Recipe) -> FrankWolfe:
    """GAMA-FW with the authors' constants; any iterate may succeed."""
    return FrankWolfe(
        Linf(recipe.data.threat.linf), steps=100, restarts=5, start="signs", objective=GAMA(),
        keep="success", decay_steps=(60, 85), decay_factor=0.2,
    )  # fmt: skip


def _with_defaults(cls: type[Attack], recipe: Recipe) -> Attack:
    """The attack of a class in the usual Linf ball, on accepted errors of the head's rejector."""
    criterion = AcceptedError(recipe.head_rejector[1], TPR(0.95))
    return cls.example(Linf(recipe.data.threat.linf), criterion)


MakeAttack = Callable[[Recipe], Attack]

_SETTINGS: dict[str, MakeAttack] = {
    "clean": lambda recipe: Clean(),
    **{f"pgd-{steps}": partial(_pgd, linf, steps) for steps in (10, 20, 100, 500, 1000)},
    **{f"pgd-{steps}-l2": partial(_pgd, l2, steps) for steps in (10, 100)},
    "adaptive": _adaptive,
    "adaptive-apgd": _adaptive_apgd,
    "multi-target": lambda recipe: MultiTarget(
        replace(linf(recipe.data, 100), objective=TargetedMargin()), restarts=20
    ),
    "gama-pgd": _gama_pgd,
    "gama-fw": _gama_fw,
    "xi": _xi,
    "autoattack": partial(_with_defaults, AutoAttackEnsemble),
    "autoattack-l2": lambda recipe: AutoAttackEnsemble(L2(recipe.data.threat.l2)),
    "autoattack-l1": lambda recipe: AutoAttackEnsemble(L1(recipe.data.threat.l1)),
    "reject-autoattack": partial(_with_defaults, RejectAutoAttackEnsemble),
    "force-rejection": partial(_with_defaults, ForceRejectionEnsemble),
    "worst-score": partial(_with_defaults, WorstScore),
    "hopskipjump": partial(_with_defaults, HopSkipJump),
    "hopskipjump-l2": lambda recipe: HopSkipJump(L2(recipe.data.threat.l2)),
    "rays": partial(_with_defaults, RayS),
    "cw": lambda recipe: CW("L2"),
    "cw-linf": lambda recipe: CW("Linf"),
    "cw-linf-adam": lambda recipe: CW("Linf-adam"),
    "cw-adaptive": lambda recipe: CW(
        "L2", criterion=AcceptedError(recipe.head_rejector[1], Median())
    ),
    "cw-adaptive-linf": lambda recipe: CW(
        "Linf", criterion=AcceptedError(recipe.head_rejector[1], Median())
    ),
    **{name: objective.attack for name, objective in ADAPTIVE_ATTACKS.items()},
}


class LiveMapping(Mapping[str, V]):
    """What a function returns now: the lists of the packages that it reads may grow."""

    def __init__(self, make: Callable[[], dict[str, V]]) -> None:
        self.make = make

    def __getitem__(self, name: str) -> V:
        return self.make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.make())

    def __len__(self) -> int:
        return len(self.make())


def _named_attacks() -> dict[str, MakeAttack]:
    """The settings above, and every other attack class with its defaults.

    A class is named by its words in lower case: MaxMinMargin is max-min-margin. Classes that
    consist of other attacks have no name.
    """
    named: dict[str, MakeAttack] = {}
    for cls in ATTACKS:
        if set(required_fields(cls)) <= {"ball", "criterion"}:
            name = cls.__name__.removesuffix("Ensemble")
            words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)
            named["-".join(words).lower()] = partial(_with_defaults, cls)
    return _SETTINGS | {k: make for k, make in named.items() if find_name(k, _SETTINGS) is None}


NAMED_ATTACKS = LiveMapping(_named_attacks)
CORRUPTIONS_GROUP = "corruptions"


def attack_group(text: str) -> list[str]:
    """Names of the attacks that a text stands for: itself, or all corruptions.

    Changes apply to each: corruptions:severity=3.
    """
    name, colon, changes = text.partition(":")
    if name != CORRUPTIONS_GROUP:
        return [text]
    rest = f",{changes}" if colon else ""
    return [f"corruption:name={one}{rest}" for one in CORRUPTIONS]
