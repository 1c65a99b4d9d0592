"""demur bench refusals."""

from typing import Annotated, get_args

import typer

from demur.cli.app import AsJson, DataFolder, Device, FirstN, finite, names_in
from demur.cli.bench import OutFile, bench_app, reports_at, tell
from demur.cli.evaluate import RunName, source_of
from demur.cli.places import checked_file
from demur.errors import BadInput, suggestion


@bench_app.command()
def refusals(
    run: RunName,
    n: FirstN = None,
    only: Annotated[str, typer.Option(help="Some of: Con,R-Con,Energy,GDA,Con+R-Con.")] = "",
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

    Example: demur bench refusals digits-pgdat-rr --n 20 --only Con,Energy --times 1
    """
    from pathlib import Path

    from demur.attacks.rejecting import RejectVersion
    from demur.balls import Linf
    from demur.bench.refusals import RULES, Budget, against_refusals
    from demur.cli.progress import say
    from demur.evaluate import Order
    from demur.recipes import VOCABULARY
    from demur.report.refusals import refusals_svg, show_refusals
    from demur.runs.files import write_bytes
    from demur.spec import edit

    names = names_in(only) or tuple(RULES)
    for name in names:
        if name not in RULES:
            raise BadInput(f"no rule is called {name!r}; {suggestion(name, RULES)}")
    versions: tuple[RejectVersion, ...] = get_args(RejectVersion)
    chosen = next((one for one in versions if one == version), None)
    if chosen is None:
        raise BadInput(f"the version must be {' or '.join(versions)}, not {version!r}")
    source = source_of(run, device, data)
    budget = Budget(chosen, times)
    ball = Linf(source.run.recipe.data.threat.linf)
    if eps is not None:
        ball = edit(ball, "eps", eps, VOCABULARY)
    rules = {name: RULES[name] for name in names}
    images, reports = source.images(Order(n=n)), reports_at(out, "rules")
    report = against_refusals(source, images, ball, rules, budget, say, reports)
    tell(report, show_refusals, out, as_json)
    if figure:
        write_bytes(Path(figure), refusals_svg(report))
