"""The ablation study of R-Con: what makes it better than confidence?

    python benchmarks/study.py study-cifar10 --seeds 2 --from results/study-cifar10

Each recipe has one setting changed; the last ones change several. `plain` has no second head;
`retrofit` trains a head on the finished net of `plain`. The options are those of
`demur paper study recipes`.
"""

from collections.abc import Mapping
from typing import get_args

import typer

from demur.cli.app import main
from demur.methods import BatchNorm
from demur.paper.commands import recipes
from demur.paper.comparisons import ADAPTIVE, COMPARISONS, Comparison
from demur.paper.scales import COMPARED_CHANGES
from demur.recipes import RECIPES, Recipe, with_changes
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


COMMAND = ("python", "benchmarks/study.py")
STUDIES = {
    "study-digits": Comparison(
        "What makes R-Con better than confidence? Digits",
        variants(RECIPES["digits-pgdat-rr"], RECIPES["digits-trades-rr"], average="0.98"),
        ADAPTIVE,
        command=COMMAND,
    ),
    "study-cifar10": Comparison(
        "What makes R-Con better than confidence? CIFAR-10, 12 epochs",
        variants(
            with_changes(
                RECIPES["cifar10-pgdat-rr-short"],
                ["epochs=12", "selection=last", *COMPARED_CHANGES],
            ),
            RECIPES["cifar10-trades-rr-short"],
            average="0.998",
        ),
        ("clean", "pgd-100"),
        split="cal",
        command=COMMAND,
    ),
}
program = typer.Typer(
    name="python benchmarks/study.py",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
program.command()(recipes)


if __name__ == "__main__":
    COMPARISONS.update(STUDIES)
    main(program)
