"""demur report and demur explore: one page about runs, as a file or live."""

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
    rejector: Annotated[list[str] | None, rejectors_option("Show it too")] = None,
    device: Device = "auto",
    data: DataFolder = None,
    verify: Verify = False,
) -> None:
    """Write one self-contained HTML page about all records of one to six runs.

    Example: demur report digits-pgdat-rr -o report.html
    """
    from demur.report.page import write_page

    _check_request(runs)
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


@app.command()
def explore(
    runs: RunNames,
    port: Annotated[int, option("Port on this machine; 0 takes a free one.", min=0, max=65535)] = 0,
    no_open: Annotated[
        bool, option("Do not open a browser; print the address.", "--no-open")
    ] = False,
    rejector: Annotated[list[str] | None, rejectors_option("Show it too")] = None,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Show the page of demur report live: it follows a training or an attack in progress.

    The page is served to this machine only, until Ctrl-C.

    Example: demur explore digits-pgdat-rr --no-open
    """
    import webbrowser

    from demur.report.live import HOST, LivePage, serving
    from demur.runs import Run

    _check_request(runs)

    def score(run: "Run") -> "ScoredRun":
        return _scored_if_any(run, device, data, rejector)

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


def _check_request(runs: list[str]) -> None:
    """Raise BadInput for too many runs, or without the report extra."""
    from demur.report.figures import check_installed
    from demur.report.scored_run import MAX_RUNS

    if len(runs) > MAX_RUNS:
        raise BadInput(f"a page shows at most {MAX_RUNS} runs; name fewer than {len(runs)}")
    check_installed()
