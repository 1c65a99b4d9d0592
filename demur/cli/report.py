"""demur report: one page about runs, as a file or live."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import DataFolder, Device, Verify, app, option, rejectors_option
from demur.cli.evaluate import load_run, score_run, score_worst_cases
from demur.errors import BadInput
from demur.files.output_paths import PAGE_OF_RUN, check_output_file, is_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from demur.evaluate import LoadedRun
    from demur.report.scored_run import ScoredRun
    from demur.runs import Run

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
    live: Annotated[bool, option("Serve the page and follow the run.", "--live")] = False,
    port: Annotated[int, option("Port of --live; 0 is a free one.", min=0, max=65535)] = 0,
    no_open: Annotated[bool, option("With --live: open no browser.", "--no-open")] = False,
    rejector: Annotated[list[str] | None, rejectors_option("Show it too")] = None,
    device: Device = "auto",
    data: DataFolder = None,
    verify: Verify = False,
) -> None:
    """Write one self-contained HTML page about all records of one to six runs, or serve it live.

    Example: demur report digits-pgdat-rr -o report.html
    """
    from demur.report.figures import check_installed
    from demur.report.page import write_page
    from demur.report.scored_run import MAX_RUNS

    if len(runs) > MAX_RUNS:
        raise BadInput(f"a page shows at most {MAX_RUNS} runs; name fewer than {len(runs)}")
    check_installed()
    if live and out is not None:
        raise BadInput("--live serves the page and writes no file; leave out --out or --live")
    if live:
        _serve(runs, port, no_open, lambda run: _scored_if_any(run, device, data, rejector))
        return
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


def _serve(runs: list[str], port: int, no_open: bool, score: "Callable[[Run], ScoredRun]") -> None:
    """Serve the page to this machine only, until Ctrl-C."""
    import webbrowser

    from demur.report.live import HOST, LivePage, serving
    from demur.runs import Run

    page = LivePage([Run.open(run) for run in runs], score)
    with serving(page, port) as server:
        page.page()  # raises for a damaged run before a browser opens
        address = f"http://{HOST}:{server.server_port}/"
        typer.echo(f"page: {address} (Ctrl-C stops it)")
        if not no_open:
            webbrowser.open(address)
        server.serve_forever()


def _scored_if_any(
    run: "Run", device: str, data: str | None, rejectors: list[str] | None = None
) -> "ScoredRun":
    """Return a run with its test records, which may be none, and which may be in training."""
    from demur.evaluate import LoadedRun
    from demur.numerics import device_by_name
    from demur.report.scored_run import ScoredRun

    if run.trained and run.records("test"):
        return scored_run(load_run(str(run.path), device, data), rejectors)
    where = Path(data) if data else None
    return ScoredRun.untrained(LoadedRun(run, device_by_name(device), where))
