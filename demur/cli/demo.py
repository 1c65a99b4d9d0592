"""demur demo: train and evaluate a small net, and write a report page."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import Device, app, option
from demur.cli.evaluate import attack_all, load_run, main_rejectors, score_run
from demur.cli.train import train_run
from demur.files.output_paths import output_folder

if TYPE_CHECKING:
    from demur.evaluate import LoadedRun

RECIPE = "digits-pgdat-rr"
ATTACKS = ["clean", "pgd-20", "adaptive"]
SUMMARY = """\
A net of 80 thousand weights, trained with PGD-AT + RR on 1,150 digits, measured
on 300 test images. Thresholds keep 95% of the correct predictions on 197 clean
images and are frozen before any attack. "adaptive" attacks R-Con itself."""


@app.command()
def demo(
    out: Annotated[str, option("The run folder.", callback=output_folder("run"))] = "runs/demo",
    epochs: Annotated[
        int | None, option("Train for fewer epochs.", min=1, shown="of the recipe")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train, attack, calibrate and report on the embedded digits, in two minutes.

    Example: demur demo --device cpu
    """
    from demur.evaluate import RecordOptions
    from demur.recipes import recipe
    from demur.report.page import write_page
    from demur.report.scored_run import ScoredRun
    from demur.report.terminal import show_table, verdict_table

    changes = [f"epochs={epochs}"] if epochs else []
    run = train_run(recipe(RECIPE, changes), Path(out), device, None)
    loaded = load_run(str(run.path), device, None)
    attack_all(loaded, ATTACKS, RecordOptions())
    certificate = _certificate(loaded)
    evaluation, scored = score_run(loaded)
    page = "none without the report extra: pip install 'demur[report]'"
    if find_spec("matplotlib") and find_spec("jinja2"):
        page = str(write_page([ScoredRun(loaded, evaluation, scored)], Path(out) / "report.html"))
    typer.echo(f"\n{SUMMARY}")
    names = [name for name in main_rejectors(loaded) if name != "A"]
    show_table(verdict_table(scored, names))
    typer.echo(f"{certificate}\nPage: {page}   All figures: demur score {run.path} --all")


def _certificate(loaded: "LoadedRun") -> str:
    """Return the certificate of a risk of at most 5%, or why there is none."""
    from textwrap import fill

    from demur.calibrate import Risk, Uncertified
    from demur.evaluate.certificates import issue

    try:
        certificate = issue(loaded, "R-Con", Risk(0.05))
    except Uncertified as reason:
        return fill(f"No certificate: {reason}", 80, subsequent_indent="  ")
    return f"Certificate for clean images, R-Con:\n  {certificate.metadata['sentence']}"
