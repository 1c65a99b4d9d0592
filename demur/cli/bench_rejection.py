"""demur bench rejection."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from demur.cli.app import AsJson, DataFolder, Device, FirstN, finite, names_in
from demur.cli.bench import OutFile, bench_app, reports_at, tell
from demur.cli.evaluate import RunName, open_evaluator
from demur.cli.output_paths import checked_file
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.attacks.reject_autoattack import RejectVersion


@bench_app.command()
def rejection(
    run: RunName,
    n: FirstN = None,
    only: Annotated[str, typer.Option(help="Some of its rejectors, such as Con,R-Con,GDA.")] = "",
    version: Annotated[str, typer.Option(help="Of reject-autoattack: fast or standard.")] = "fast",
    times: Annotated[
        float,
        typer.Option(
            min=0.0, callback=finite, help="Looks of the others, as a multiple of its own."
        ),
    ] = 10.0,
    eps: Annotated[
        str | None,
        typer.Option(help="The Linf radius, such as 0.2 or 8/255.", show_default="the data's own"),
    ] = None,
    out: OutFile = None,
    figure: Annotated[
        str | None,
        typer.Option(callback=checked_file, help="Draw the curves into this SVG file."),
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Hold reject-autoattack against simpler attacks that may look ten times as often.

    Example: demur bench rejection digits-pgdat-rr --n 20 --only Con,Energy --times 1
    """
    from demur.balls import Linf
    from demur.bench.peer_rejection import Budget, compare_rejection_attacks, rules_by_name
    from demur.cli.progress import say
    from demur.evaluate import AttackOptions
    from demur.recipes import VOCABULARY
    from demur.spec import edit

    if out and figure and Path(out).resolve() == Path(figure).resolve():
        raise BadInput(f"{out} cannot take both the report and the picture; name two files")
    budget = Budget(_version(version), times)
    evaluator = open_evaluator(run, device, data)
    rules = rules_by_name(names_in(only), evaluator.run.recipe)
    ball = Linf(evaluator.run.recipe.data.threat.linf)
    if eps is not None:
        ball = edit(ball, "eps", eps, VOCABULARY)
    images, reports = evaluator.images(AttackOptions(n=n)), reports_at(out, "rules")
    so_far: dict[str, Any] = {}

    def keep(report: dict[str, Any]) -> None:
        so_far.update(report)
        reports.keep(report)

    try:
        growing = replace(reports, keep=keep)
        keep(compare_rejection_attacks(evaluator, images, ball, rules, budget, say, growing))
    finally:
        if so_far:  # a rule that fails, or takes too long, leaves what the others have found
            _tell(so_far, out, figure, as_json)


def _version(name: str) -> "RejectVersion":
    from demur.attacks.reject_autoattack import RejectVersion

    versions: tuple[RejectVersion, ...] = get_args(RejectVersion)
    for version in versions:
        if version == name:
            return version
    raise BadInput(f"the version must be {' or '.join(versions)}, not {name!r}")


def _tell(report: dict[str, Any], out: str | None, figure: str | None, as_json: bool) -> None:
    """The report as a table or JSON, kept if a file is named, and its curves as a picture."""
    from demur.report.peer_rejection import peer_rejection_svg, show_peer_rejection
    from demur.runs.files import write_bytes

    tell(report, show_peer_rejection, out, as_json)
    if figure:
        write_bytes(Path(figure), peer_rejection_svg(report))
