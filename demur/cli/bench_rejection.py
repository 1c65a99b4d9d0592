"""demur bench rejection."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from demur.cli.app import AsJson, DataFolder, Device, FirstN, check_finite, split_names
from demur.cli.bench import OutFile, bench_app, open_reports, print_report
from demur.cli.evaluate import RunName, load_run
from demur.cli.output_paths import check_output_file
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.attacks.reject_autoattack import RejectVersion


@bench_app.command()
def rejection(
    run: RunName,
    n: FirstN = None,
    only: Annotated[str, typer.Option(help="Only these rejectors, such as Con,R-Con,GDA.")] = "",
    version: Annotated[
        str, typer.Option(help="Version of reject-autoattack: fast or standard.")
    ] = "fast",
    times: Annotated[
        float,
        typer.Option(
            min=0.0,
            callback=check_finite,
            help="Gradient queries of the other attacks, as a multiple.",
        ),
    ] = 10.0,
    eps: Annotated[
        str | None,
        typer.Option(help="The Linf radius, such as 0.2 or 8/255.", show_default="the data's own"),
    ] = None,
    out: OutFile = None,
    figure: Annotated[
        str | None,
        typer.Option(callback=check_output_file, help="Draw the curves into this SVG file."),
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Compare reject-autoattack with simpler attacks that get ten times its gradient queries.

    Example: demur bench rejection digits-pgdat-rr --n 20 --only Con,Energy --times 1
    """
    from demur.balls import Linf
    from demur.bench.peer_rejection import Budget, compare_rejection_attacks, rules_by_name
    from demur.cli.progress import on_message
    from demur.evaluate import RecordOptions
    from demur.recipes import VOCABULARY
    from demur.spec import edit

    if out and figure and Path(out).resolve() == Path(figure).resolve():
        raise BadInput(f"{out} cannot take both the report and the picture; name two files")
    budget = Budget(_version(version), times)
    loaded = load_run(run, device, data)
    rules = rules_by_name(split_names(only), loaded.run.recipe)
    ball = Linf(loaded.run.recipe.data.threat.linf)
    if eps is not None:
        ball = edit(ball, "eps", eps, VOCABULARY)
    images, reports = loaded.images(RecordOptions(n=n)), open_reports(out, "rules")
    so_far: dict[str, Any] = {}

    def keep(report: dict[str, Any]) -> None:
        so_far.update(report)
        reports.keep(report)

    try:
        growing = replace(reports, keep=keep)
        keep(compare_rejection_attacks(loaded, images, ball, rules, budget, on_message, growing))
    finally:
        if so_far:  # also after an error or Ctrl-C: show the rules that are finished
            _print_and_draw(so_far, out, figure, as_json)


def _version(name: str) -> "RejectVersion":
    """Return the version of that name; raise BadInput where there is none."""
    from demur.attacks.reject_autoattack import RejectVersion

    versions: tuple[RejectVersion, ...] = get_args(RejectVersion)
    for version in versions:
        if version == name:
            return version
    raise BadInput(f"the version must be {' or '.join(versions)}, not {name!r}")


def _print_and_draw(
    report: dict[str, Any], out: str | None, figure: str | None, as_json: bool
) -> None:
    """Print the report as a table or JSON, write it to `out` and draw its curves into `figure`."""
    from demur.report.peer_rejection import peer_rejection_svg, show_peer_rejection
    from demur.runs.files import write_bytes

    print_report(report, show_peer_rejection, out, as_json)
    if figure:
        write_bytes(Path(figure), peer_rejection_svg(report))
