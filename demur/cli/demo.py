"""demur demo and demur report: from nothing, or from a run, to a page to look at."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import DataFolder, Device, app
from demur.cli.evaluate import RunName, attack_all, available, open_evaluator, scored_run
from demur.cli.output_paths import checked_file, checked_folder
from demur.cli.train import trained

if TYPE_CHECKING:
    from demur.evaluate import Evaluator

RECIPE = "digits-pgdat-rr"
ATTACKS = ["clean", "pgd-20", "adaptive"]


@app.command()
def demo(
    out: Annotated[
        str, typer.Option(callback=checked_folder, help="The run folder.")
    ] = "runs/demo",
    device: Device = "auto",
) -> None:
    """Train, attack, calibrate and report on the embedded digits; prints where the page is.

    Example: demur demo --device cpu
    """
    from demur.evaluate import AttackOptions
    from demur.recipes import recipe

    run = trained(recipe(RECIPE), Path(out), device, None)
    evaluator = open_evaluator(str(run.path), device, None)
    attack_all(evaluator, ATTACKS, AttackOptions())
    _promise(evaluator)
    page = _page(evaluator, Path(out) / "report.html", tables=True)
    typer.echo(f"the page: {page.resolve()}")


@app.command()
def report(
    run: RunName,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=checked_file, help="The page.", show_default="RUN/report.html"
        ),
    ] = None,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Write one self-contained page about everything a run has records of.

    Example: demur report digits-pgdat-rr -o report.html
    """
    from demur.runs.files import is_stream

    evaluator = open_evaluator(run, device, data)
    place = out or str(evaluator.run.path / "report.html")
    checked_file(place)
    page = _page(evaluator, Path(place), tables=False)
    if not is_stream(page):  # nothing comes after a page that goes into a pipe
        typer.echo(f"the page: {page.resolve()}")


def _promise(evaluator: "Evaluator") -> None:
    """A threshold with a guarantee, or the reason why there is none."""
    from demur.calibrate import Risk, Uncertified
    from demur.evaluate.certificates import issue
    from demur.report.certificates import certificate_words

    try:
        typer.echo(certificate_words(issue(evaluator, "R-Con", Risk(0.05))))
    except Uncertified as reason:
        typer.echo(f"no certificate: {reason}")


def _page(evaluator: "Evaluator", path: Path, tables: bool) -> Path:
    from demur.evaluate.certificates import retests
    from demur.report.certificates import show_retests
    from demur.report.page import write_page
    from demur.report.text import show_scores

    scoring, scored = scored_run(evaluator)
    available(scoring, ("deploy",))
    if tables:
        show_scores(scored, ["deploy"])
        show_retests(retests(evaluator, scoring.scores, [s.record for s in scored]))
    return write_page(evaluator, scored, scoring, path)
