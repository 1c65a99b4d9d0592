"""demur retrofit: an R-Con head for a net that somebody else trained."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import AsJson, Device, app
from demur.cli.output_paths import check_output_folder
from demur.cli.train import train_run, with_data
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.retrofitting import HeadComparison
    from demur.runs import Run


@app.command()
def retrofit(
    model: Annotated[
        str,
        typer.Argument(help="module:function that returns the trained net; it is imported."),
    ],
    changes: Annotated[list[str], typer.Argument(metavar="data=PATH [KEY=VALUE]...")],
    layer: Annotated[
        str,
        typer.Option(help="Layer whose output the head reads.", show_default="the penultimate"),
    ] = "",
    out: Annotated[
        str | None,
        typer.Option(
            callback=check_output_folder, help="The run folder.", show_default="runs/retrofit-NAME"
        ),
    ] = None,
    guard: Annotated[
        str | None,
        typer.Option(
            callback=check_output_folder, help="The folder of the guard.",
            show_default="guards/RUN",
        ),
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
) -> None:  # fmt: skip
    """Learn an R-Con head on a frozen net, compare it with the net's confidence, export a guard.

    Give images that the net was not trained on.

    Example: demur retrofit my_nets:load data=photos size=64
    """
    import json

    from demur.cli.evaluate import load_run
    from demur.cli.progress import CountBar
    from demur.guards.bundle import check_target
    from demur.retrofitting import compare, retrofit_recipe

    if not any(change.startswith("data=") for change in changes):
        raise BadInput("a retrofit needs images; name them with data=PATH")
    recipe = retrofit_recipe(model, changes, layer)
    folder = Path(out) if out else Path("runs") / f"retrofit-{model.rpartition(':')[2]}"
    bundle = Path(guard) if guard else Path("guards") / folder.name
    check_target(bundle)
    run = train_run(with_data(recipe), folder, device, None)
    loaded = load_run(str(run.path), device, None)
    with CountBar("compare", "images") as bar:
        found = compare(loaded, bar.on_progress)
    if as_json:
        rows = [{**vars(one), "difference": one.difference._asdict(), "verdict": one.verdict}
                for one in found]  # fmt: skip
        typer.echo(json.dumps({"run": str(run.path), "comparisons": rows}, indent=2))
    else:
        typer.echo("\n".join(_lines(found)))
    _export(run, bundle, device, model)


def _lines(found: "tuple[HeadComparison, ...]") -> list[str]:
    """Return one line per comparison, and what follows from them."""
    verdicts = {one.verdict for one in found}
    lines = [one.sentence for one in found]
    if verdicts <= {"better", "no difference shown"} and "better" in verdicts:
        return [*lines, "the head is worth it: better somewhere, nowhere shown to be worse"]
    if "worse" in verdicts and "better" in verdicts:
        return [*lines, "the head helps in some cases and harms in others; see the lines above"]
    worse = "worse than" if "worse" in verdicts else "not shown to be better than"
    return [
        *lines,
        f"the head is {worse} the net's own confidence; a guard of that is made by demur export "
        "RUN --rejector Con",
    ]


def _export(run: "Run", bundle: Path, device: str, model: str) -> None:
    """Write a guard of the run, calibrated on its cal images."""
    from demur.cli.progress import on_message
    from demur.guards import Guard

    made = Guard.from_run(run, device=device)
    made.save(bundle)
    on_message(f"{bundle}: {made.calibration['sentence']}")
    if made.certificate is None:
        on_message(f"the thresholds have no guarantee: {made.calibration['shortfall']}")
    module = model.partition(":")[0]
    serve = shlex.join(["demur", "serve", str(bundle)])
    on_message(f"its net is your code, so allow that: DEMUR_MODULES={module} {serve}")
