"""The ablation study of R-Con: recipes by name, each with one setting changed.

    variants(RECIPES["digits-pgdat-rr"], RECIPES["digits-trades-rr"], average="0.98")

The last variants change several settings. `plain` has no second head; `retrofit` trains a head on
the finished net of `plain`.
"""

from collections.abc import Mapping
from typing import get_args

from demur.methods import BatchNorm
from demur.recipes import Recipe, with_changes
from demur.spec import show

WEIGHTS = ("0.1", "0.3", "3", "10")
TAUS = ("0.5", "0.25", "0.125", "0.0625")
JOINT = ("head.joint=true",)
AUX_ONLY = ("head.construction=aux",)
AUX_ABSOLUTE = (*AUX_ONLY, "head.rr_loss=absolute")
HELD_OUT_HEAD = ("head.gradient_to=head", "method.head_only=0.2")
CHANGES: dict[str, tuple[str, ...]] = {
    "rr": (),
    "plain": ("method.head=NoHead()",),
    **{f"weight-{weight}": (f"head.weight={weight}",) for weight in WEIGHTS},
    **{f"tau-{tau}": (f"head.tau={tau}",) for tau in TAUS},
    **{f"bn-{mode}": (f"framework.bn={mode}",) for mode in get_args(BatchNorm)},
    "joint": JOINT,
    "joint-eval": (*JOINT, "framework.bn=eval"),
    "clean-too": ("head.images=both",),
    "all-blocks": ("head.features=all",),
    "squared": ("head.rr_loss=squared",),
    "absolute": ("head.rr_loss=absolute",),
    "margin": ("head.rr_loss=margin",),
    "difference": ("head.construction=difference",),
    "a-only": AUX_ONLY,
    "a-absolute": AUX_ABSOLUTE,
    "a-absolute-joint": (*AUX_ABSOLUTE, *JOINT, "framework.bn=eval"),
    "atro": ("method.head=ATRO()",),
    "con-only": ("head.construction=con",),
    "tcon-learns": ("head.stop_tcon=false",),
    "con-learns": ("head.stop_con=none",),
    "head-only": ("head.gradient_to=head",),
    "unfitted": HELD_OUT_HEAD,
    "unfitted-blocks": (*HELD_OUT_HEAD, "head.features=all"),
    "awp": ("awp=0.005",),
}


def variants(recipe: Recipe, trades: Recipe, average: str) -> Mapping[str, Recipe]:
    """The variants of a recipe; `average` is the EMA decay that suits its number of steps."""
    framework = (f"method.framework={show(trades.method.framework, full=True)}",)
    more = {
        "trades": framework,
        "average": (f"ema={average}",),
        "average-awp": (f"ema={average}", "awp=0.005"),
        "average-unfitted": (f"ema={average}", *HELD_OUT_HEAD),
        "trades-plain": (*framework, "method.head=NoHead()"),
        "trades-retrofit": (*framework, "base=trades-plain"),
        "trades-tau-0.5": (*framework, "head.tau=0.5"),
        "trades-a-absolute": (*framework, *AUX_ABSOLUTE),
        "trades-average-awp": (*framework, f"ema={average}", "awp=0.005"),
        "retrofit": ("base=plain",),
    }
    variants = {name: with_changes(recipe, changes) for name, changes in (CHANGES | more).items()}
    # a change to the default value is no variant
    return {name: one for name, one in variants.items() if name == "rr" or one != recipe}
