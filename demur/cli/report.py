"""demur report: one page about runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import DataFolder, Device, Verify, app, option, rejectors_option
from demur.cli.evaluate import load_run, score_run, score_worst_cases
from demur.errors import BadInput
from demur.files.output_paths import PAGE_OF_RUN, check_output_file, is_stream

if TYPE_CHECKING:
    from demur.evaluate import LoadedRun
    from demur.report.scored_run import ScoredRun

RunNames = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="One to six run folders, or names in runs/.")
]


@app.command()
def report(
    runs: RunNames,
    out: Annotated[
        str | None,
        option(
            "The HTML file to write.",
            "--out",
            "-o",
            shown="RUN/report.html; report.html for several runs",
        ),
    ] = None,
    rejector: Annotated[list[str] | None, rejectors_option("Show it too")] = None,
    device: Device = "auto",
    data: DataFolder = None,
    verify: Verify = False,
) -> None:
    """Write one self-contained HTML page about all records of one to six runs.

    Example: demur report digits-pgdat-rr -o report.html
    """
    from demur.report.figures import check_installed
    from demur.report.page import write_page
    from demur.report.scored_run import MAX_RUNS

    if len(runs) > MAX_RUNS:
        raise BadInput(f"a page shows at most {MAX_RUNS} runs; name fewer than {len(runs)}")
    check_installed()
    own = [home / run for run in runs for home in (Path(), Path("runs"))]
    check_output_file(out, "page", own)
    loaded = [load_run(run, device, data, verify=verify) for run in runs]
    path = out or str((loaded[0].run.path if len(runs) == 1 else Path()) / PAGE_OF_RUN)
    check_output_file(path, "page", own)
    results = [scored_run(one, rejector) for one in loaded]
    page = write_page(results, Path(path))
    if not is_stream(page):  # a pipe gets the page and nothing else
        typer.echo(f"page: {page.resolve()}")


def scored_run(loaded: "LoadedRun", rejectors: list[str] | None = None) -> "ScoredRun":
    """Return a run with its test records scored; raise BadInput where it has none."""
    from demur.recipes import rejectors_named
    from demur.report.scored_run import ScoredRun

    recipe = loaded.run.recipe
    every = recipe.rejectors() | rejectors_named(rejectors or (), recipe)
    evaluation, scored = score_run(loaded, every)
    return ScoredRun(loaded, evaluation, scored, score_worst_cases(loaded, evaluation))
