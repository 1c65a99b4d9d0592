"""The attacks people type, each made for a run of some recipe."""

from collections.abc import Callable
from dataclasses import replace

from demur.attacks import (
    APGD,
    CW,
    PGD,
    Attack,
    AutoAttack,
    Clean,
    EachTarget,
    Evade,
    ForceRefusal,
    FrankWolfe,
    Product,
    RejectAutoAttack,
    Relaxed,
    Slips,
    Toward,
    Unanswered,
    Xi,
)
from demur.balls import L2, Linf
from demur.calibrate import TPR, Median
from demur.errors import BadInput
from demur.recipes.adaptive import WEIGHED
from demur.recipes.training import Recipe
from demur.recipes.usual import l2, linf


def _adaptive(recipe: Recipe) -> PGD:
    """PGD that is wrong and trusted by the head's own score, kept by what gets past it."""
    _, own = recipe.own
    return replace(
        linf(recipe.data, 50), goal=Evade(own, eta=0.1), keep="criterion",
        criterion=Slips(own, TPR(0.95)),
    )  # fmt: skip


def _adaptive_apgd(recipe: Recipe) -> APGD:
    """Auto-PGD on the wrong probability times the chance of being accepted: nothing to weigh."""
    rule = Slips(recipe.own[1], TPR(0.95))
    return APGD(Linf(recipe.data.threat.linf), goal=Product(rule), criterion=rule)


def _xi(recipe: Recipe) -> PGD:
    """PGD that takes A away from A*, at the temperature that A was trained for."""
    if not recipe.has_a:
        raise BadInput("xi is about A, which confidence is multiplied by; use head=RR()")
    return replace(linf(recipe.data, 50), goal=Xi(recipe.tau))


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
    "pgd-10": lambda recipe: linf(recipe.data, 10),
    "pgd-20": lambda recipe: linf(recipe.data, 20),
    "pgd-100": lambda recipe: linf(recipe.data, 100),
    "pgd-500": lambda recipe: linf(recipe.data, 500),
    "pgd-1000": lambda recipe: linf(recipe.data, 1000),
    "pgd-10-l2": lambda recipe: l2(recipe.data, 10),
    "pgd-100-l2": lambda recipe: l2(recipe.data, 100),
    "adaptive": _adaptive,
    "adaptive-apgd": _adaptive_apgd,
    "multi-target": lambda recipe: EachTarget(
        replace(linf(recipe.data, 100), goal=Toward(), restarts=20)
    ),
    "gama-pgd": _gama_pgd,
    "gama-fw": _gama_fw,
    "xi": _xi,
    "autoattack": lambda recipe: AutoAttack(Linf(recipe.data.threat.linf)),
    "autoattack-l2": lambda recipe: AutoAttack(L2(recipe.data.threat.l2)),
    "reject-autoattack": lambda recipe: RejectAutoAttack(
        Linf(recipe.data.threat.linf), Slips(recipe.own[1], TPR(0.95))
    ),
    "force-refusal": lambda recipe: ForceRefusal(
        Linf(recipe.data.threat.linf), Unanswered(recipe.own[1], TPR(0.95))
    ),
    "cw": lambda recipe: CW("L2"),
    "cw-linf": lambda recipe: CW("Linf"),
    "cw-linf-adam": lambda recipe: CW("Linf-adam"),
    "cw-adaptive": lambda recipe: CW("L2", criterion=Slips(recipe.own[1], Median())),
    "cw-adaptive-linf": lambda recipe: CW("Linf", criterion=Slips(recipe.own[1], Median())),
    **{name: objective.attack for name, objective in WEIGHED.items()},
}
