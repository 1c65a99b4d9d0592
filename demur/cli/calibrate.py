"""demur calibrate."""

from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, app, finite
from demur.cli.evaluate import RunName, open_evaluator
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.calibrate import Guarantee


@app.command()
def calibrate(
    run: RunName,
    risk: Annotated[
        float | None,
        typer.Option(callback=finite, help="At most this share wrong among the accepted."),
    ] = None,
    tpr: Annotated[
        float | None,
        typer.Option(callback=finite, help="At least this share of the right answers accepted."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(callback=finite, help="At least this share of all images accepted."),
    ] = None,
    confidence: Annotated[
        float, typer.Option(callback=finite, help="How sure the promise is to be.")
    ] = 0.95,
    rejector: Annotated[
        str | None,
        typer.Option(
            help="As named by demur score; Con+R-Con sets both thresholds.",
            show_default="the score of the head, Con without one",
        ),
    ] = None,
    attack: Annotated[
        str, typer.Option(help="Calibrate on attacked images; valid for that attack only.")
    ] = "clean",
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Choose thresholds with a guarantee on images held out for nothing else, and keep it.

    Example: demur calibrate digits-pgdat-rr --risk 0.05 --rejector Con+R-Con
    """
    import json

    from demur.evaluate.certificates import issue
    from demur.recipes import attack as attack_named
    from demur.report.certificates import certificate_words

    guarantee = _promise(risk, tpr, coverage)
    evaluator = open_evaluator(run, device, data, engine)
    meant = attack_named(attack, evaluator.run.recipe)
    own = next(iter(evaluator.run.recipe.method.head.rejectors()), "Con")
    made = issue(evaluator, rejector or own, guarantee, confidence, attack, meant)
    typer.echo(json.dumps(made.metadata, indent=2) if as_json else certificate_words(made))


def _promise(risk: float | None, tpr: float | None, coverage: float | None) -> "Guarantee":
    """The one promise that was asked for."""
    from demur.calibrate import TPR, Coverage, Risk

    asked = {"risk": risk, "tpr": tpr, "coverage": coverage}
    given = {name: level for name, level in asked.items() if level is not None}
    if len(given) != 1:
        raise BadInput("promise one thing: give --risk, --tpr or --coverage, such as --risk 0.05")
    ((name, level),) = given.items()
    if not 0 < level < 1:
        raise BadInput(f"--{name} is {level:g}; give a share between 0 and 1, such as 0.05")
    kinds: dict[str, type[Risk] | type[TPR] | type[Coverage]]
    kinds = {"risk": Risk, "tpr": TPR, "coverage": Coverage}
    return kinds[name](level)
