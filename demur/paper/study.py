"""What makes R-Con better than confidence? The settings that a study compares, by name.

    variants(RECIPES["digits-pgdat-rr"], RECIPES["digits-trades-rr"], average="0.98")

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
MEDIAN = (*ALONE, "head.objective=absolute")
APART = ("head.reach=head", "method.apart=0.2")
CHANGES: dict[str, tuple[str, ...]] = {
    "rr": (),
    "plain": ("method.head=Plain()",),
    **{f"weight-{weight}": (f"head.weight={weight}",) for weight in WEIGHTS},
    **{f"tau-{tau}": (f"head.tau={tau}",) for tau in TAUS},
    **{f"bn-{mode}": (f"frame.bn={mode}",) for mode in get_args(BatchNorm)},
    "joint": JOINT,
    "joint-eval": (*JOINT, "frame.bn=eval"),
    "clean-too": ("head.on=both",),
    "all-blocks": ("head.blocks=all",),
    "squared": ("head.objective=squared",),
    "absolute": ("head.objective=absolute",),
    "margin": ("head.objective=margin",),
    "difference": ("head.construction=difference",),
    "a-only": ALONE,
    "a-absolute": MEDIAN,
    "a-absolute-joint": (*MEDIAN, *JOINT, "frame.bn=eval"),
    "atro": ("method.head=ATRO()",),
    "con-only": ("head.construction=con",),
    "tcon-learns": ("head.stop_tcon=false",),
    "con-learns": ("head.stop_con=none",),
    "head-only": ("head.reach=head",),
    "unfitted": APART,
    "unfitted-blocks": (*APART, "head.blocks=all"),
    "awp": ("awp=0.005",),
}


def variants(recipe: Recipe, trades: Recipe, average: str) -> Mapping[str, Recipe]:
    """The recipe with each change; `average` suits the number of its steps."""
    frame = (f"method.frame={show(trades.method.frame, full=True)}",)
    more = {
        "trades": frame,
        "average": (f"average={average}",),
        "average-awp": (f"average={average}", "awp=0.005"),
        "average-unfitted": (f"average={average}", *APART),
        "trades-plain": (*frame, "method.head=Plain()"),
        "trades-retrofit": (*frame, "base=trades-plain"),
        "trades-tau-0.5": (*frame, "head.tau=0.5"),
        "trades-a-absolute": (*frame, *MEDIAN),
        "trades-average-awp": (*frame, f"average={average}", "awp=0.005"),
        "retrofit": ("base=plain",),
    }
    made = {name: changed(recipe, changes) for name, changes in (CHANGES | more).items()}
    return {name: each for name, each in made.items() if name == "rr" or each != recipe}
