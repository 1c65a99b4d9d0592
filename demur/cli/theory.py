"""demur theory."""

import json
from pathlib import Path
from typing import Annotated

import typer

from demur.cli.app import AsJson, app, finite
from demur.cli.evaluate import RunName, check_finished
from demur.cli.output_paths import checked_file


@app.command()
def theory(
    run: RunName,
    gamma: Annotated[
        list[float] | None,
        typer.Option(
            callback=finite,
            help="A confidence threshold; repeat for several.",
            show_default="0.55 0.6 0.7 0.8 0.9",
        ),
    ] = None,
    rho: Annotated[float, typer.Option(callback=finite, help="Theorem 2's rounding error.")] = 0.01,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", callback=checked_file, help="Also draw an SVG figure there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hold the paper's theory against every test record of a run; needs neither weights nor data.

    Example: demur theory digits-pgdat-rr --gamma 0.7 --gamma 0.9
    """
    from demur.evaluate.theory import GAMMAS
    from demur.evaluate.theory import theory as theory_of
    from demur.report.theory import show_theory
    from demur.runs import Run

    found = Run.open(run)
    if found.recipe.has_rectifier:  # else no training would help
        check_finished(found)
    report = theory_of(found, tuple(gamma or GAMMAS), rho)
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2))
    else:
        show_theory(report)
    if out:
        from demur.report.theory_figure import write_figure

        write_figure(report, found, Path(out))
    if report.violations:
        typer.echo(f"demur: {report.violations} cases against a proven statement: a bug", err=True)
        raise typer.Exit(1)
