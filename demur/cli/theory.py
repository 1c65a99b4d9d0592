"""demur theory."""

import json
from pathlib import Path
from typing import Annotated

import typer

from demur.cli.app import AsJson, app, check_finite
from demur.cli.evaluate import RunName, check_finished
from demur.cli.output_paths import check_output_file


@app.command()
def theory(
    run: RunName,
    gamma: Annotated[
        list[float] | None,
        typer.Option(
            callback=check_finite,
            help="A confidence threshold; repeat for several.",
            show_default="0.55 0.6 0.7 0.8 0.9",
        ),
    ] = None,
    rho: Annotated[
        float, typer.Option(callback=check_finite, help="The rounding error of Theorem 2.")
    ] = 0.01,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=check_output_file, help="Also draw a figure into this SVG file."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the paper's theorems on every test record of a run; needs neither weights nor data.

    Example: demur theory digits-pgdat-rr --gamma 0.7 --gamma 0.9
    """
    from demur.evaluate.theory import GAMMAS
    from demur.evaluate.theory import theory as theory_of
    from demur.report.theory import show_theory, write_figure
    from demur.runs import Run

    opened = Run.open(run)
    if opened.recipe.has_rectifier:  # without one, more training does not help
        check_finished(opened)
    report = theory_of(opened, tuple(gamma or GAMMAS), rho)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        show_theory(report)
    if out:
        write_figure(report, opened, Path(out))
    if report.violations:
        typer.echo(
            f"demur: {report.violations} cases contradict a theorem: a bug in demur",
            err=True,
        )
        raise typer.Exit(1)
