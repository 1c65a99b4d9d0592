"""What makes R-Con better than confidence? The settings that a study compares, by name.

    variants(RECIPES["digits-pgdat-rr"], RECIPES["digits-trades-rr"], ema="0.98")

Each is the usual recipe with one thing changed; the last ones change several. The `plain` ones have
no second head, and a `retrofit` learns one on the finished net of its `plain`.
"""

from collections.abc import Mapping
from typing import get_args

from demur.methods import BatchNorm
from demur.recipes import Recipe, changed
from demur.spec import show

WEIGHTS = ("0.1", "0.3", "3", "10")
TAUS = ("0.5", "0.25", "0.125", "0.0625")
JOINT = ("head.joint=true",)
ALONE = ("head.construction=aux",)
MEDIAN = (*ALONE, "head.rr_loss=absolute")
APART = ("head.gradient_to=head", "method.head_only=0.2")
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
    "a-only": ALONE,
    "a-absolute": MEDIAN,
    "a-absolute-joint": (*MEDIAN, *JOINT, "framework.bn=eval"),
    "atro": ("method.head=ATRO()",),
    "con-only": ("head.construction=con",),
    "tcon-learns": ("head.stop_tcon=false",),
    "con-learns": ("head.stop_con=none",),
    "head-only": ("head.gradient_to=head",),
    "unfitted": APART,
    "unfitted-blocks": (*APART, "head.features=all"),
    "awp": ("awp=0.005",),
}


def variants(recipe: Recipe, trades: Recipe, average: str) -> Mapping[str, Recipe]:
    """The recipe with each change; `average` suits the number of its steps."""
    framework = (f"method.framework={show(trades.method.framework, full=True)}",)
    more = {
        "trades": framework,
        "average": (f"ema={average}",),
        "average-awp": (f"ema={average}", "awp=0.005"),
        "average-unfitted": (f"ema={average}", *APART),
        "trades-plain": (*framework, "method.head=NoHead()"),
        "trades-retrofit": (*framework, "base=trades-plain"),
        "trades-tau-0.5": (*framework, "head.tau=0.5"),
        "trades-a-absolute": (*framework, *MEDIAN),
        "trades-average-awp": (*framework, f"ema={average}", "awp=0.005"),
        "retrofit": ("base=plain",),
    }
    made = {name: changed(recipe, changes) for name, changes in (CHANGES | more).items()}
    return {name: each for name, each in made.items() if name == "rr" or each != recipe}
