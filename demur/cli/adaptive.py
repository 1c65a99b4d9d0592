"""demur adaptive."""

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, FirstN, app
from demur.cli.evaluate import RunName, available, open_evaluator, protocols_named, record_of
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.evaluate import AttackOptions, Evaluator, Protocol
    from demur.evaluate.adaptive import AdaptivePlan
    from demur.report.adaptive import Findings


@app.command()
def adaptive(
    run: RunName,
    protocol: Annotated[str, typer.Option(help="paper, deploy or both.")] = "both",
    objectives: Annotated[
        str | None,
        typer.Option(help="Names with commas, such as ce-log-score,con-rr.", show_default="all"),
    ] = None,
    etas: Annotated[str, typer.Option(help="Weights of what is after the rejector.")] = (
        "0.1,0.3,1,3,10,30,100"
    ),
    steps: Annotated[int, typer.Option(help="Of each attack.")] = 500,
    restarts: Annotated[int, typer.Option(help="Of each attack.")] = 10,
    n: FirstN = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Attack the rejector by every adaptive objective of the paper, at every weight eta.

    paper: one record an objective and eta. deploy: one record of the worst for each image.

    Example: demur adaptive digits-pgdat-rr --steps 50 --restarts 2
    """
    from demur.cli.progress import silence_other_ranks
    from demur.device import device_by_name
    from demur.distributed import current, init_distributed
    from demur.evaluate import AttackOptions
    from demur.evaluate.adaptive import AdaptivePlan
    from demur.report.adaptive import show_adaptive

    asked = protocols_named(protocol)
    with init_distributed(device_by_name(device)) as place:
        silence_other_ranks()
        evaluator = open_evaluator(run, str(place), data, engine)
        named = None if objectives is None else [name.strip() for name in objectives.split(",")]
        plan = AdaptivePlan.of(evaluator.run.recipe, named, _numbers(etas), steps, restarts)
        if named is None and evaluator.run.recipe.rr_head is None:
            typer.echo("demur: without L_RR: no second output was trained by it", err=True)
        found = _found(evaluator, plan, AttackOptions(n=n), asked)
        if not current().is_leader:
            return
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show_adaptive(found)


def _found(
    evaluator: "Evaluator",
    plan: "AdaptivePlan",
    options: "AttackOptions",
    asked: tuple["Protocol", ...],
) -> "Findings":
    """Everything that was asked for, read from records or made."""
    from demur.evaluate import Scorer
    from demur.evaluate.adaptive import trials
    from demur.recipes import attack as attack_named
    from demur.report.adaptive import Findings

    scoring = Scorer.of(evaluator, rejectors=plan.rejectors, records=[])
    asked = available(scoring, asked)
    make = partial(record_of, evaluator, options=options)
    plain = scoring.scored(make(plan.plain, attack_named(plan.plain, plan.recipe)))
    tried = trials(plan, make, scoring) if "paper" in asked else []
    worst = scoring.scored(make(plan.worst_label, plan.worst)) if "deploy" in asked else None
    return Findings(plan.recipe.head_rejector[0], plain, tried, worst)


def _numbers(text: str) -> list[float]:
    """The numbers between commas."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BadInput(f"--etas is {text!r}; give numbers, such as --etas 0.1,1,10") from None
