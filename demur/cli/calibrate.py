"""demur calibrate."""

from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, app, check_finite
from demur.cli.evaluate import RunName, load_run
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.calibrate import Guarantee


@app.command()
def calibrate(
    run: RunName,
    risk: Annotated[
        float | None,
        typer.Option(
            callback=check_finite, help="At most this share of the accepted images wrong."
        ),
    ] = None,
    tpr: Annotated[
        float | None,
        typer.Option(
            callback=check_finite, help="At least this share of the correct predictions accepted."
        ),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(callback=check_finite, help="At least this share of all images accepted."),
    ] = None,
    confidence: Annotated[
        float, typer.Option(callback=check_finite, help="Confidence level of the guarantee.")
    ] = 0.95,
    rejector: Annotated[
        str | None,
        typer.Option(
            help="A name of demur score; Con+R-Con sets both thresholds.",
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
    """Choose thresholds with a statistical guarantee on the cal images and store the certificate.

    Example: demur calibrate digits-pgdat-rr --risk 0.05 --rejector Con+R-Con
    """
    import json

    from demur.evaluate.certificates import issue
    from demur.recipes import attack as attack_named
    from demur.report.certificates import certificate_text

    guarantee = _guarantee(risk, tpr, coverage)
    loaded = load_run(run, device, data, engine)
    spec = attack_named(attack, loaded.run.recipe)
    default = next(iter(loaded.run.recipe.method.head.rejectors()), "Con")
    certificate = issue(loaded, rejector or default, guarantee, confidence, attack, spec)
    typer.echo(
        json.dumps(certificate.metadata, indent=2) if as_json else certificate_text(certificate)
    )


def _guarantee(risk: float | None, tpr: float | None, coverage: float | None) -> "Guarantee":
    """Return the guarantee of the one option that is given."""
    from demur.calibrate import TPR, Coverage, Risk

    asked = {"risk": risk, "tpr": tpr, "coverage": coverage}
    given = {name: level for name, level in asked.items() if level is not None}
    if len(given) != 1:
        raise BadInput("give exactly one of --risk, --tpr and --coverage, such as --risk 0.05")
    ((name, level),) = given.items()
    if not 0 < level < 1:
        raise BadInput(f"--{name} is {level:g}; give a share between 0 and 1, such as 0.05")
    kinds: dict[str, type[Risk] | type[TPR] | type[Coverage]]
    kinds = {"risk": Risk, "tpr": TPR, "coverage": Coverage}
    return kinds[name](level)
