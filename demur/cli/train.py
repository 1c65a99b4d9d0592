"""demur train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import DataFolder, Device, Engine, app
from demur.cli.output_paths import checked_folder

if TYPE_CHECKING:
    from demur.recipes import Recipe
    from demur.runs import Run


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (demur list recipes) or @FILE.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    out: Annotated[
        str | None,
        typer.Option(callback=checked_folder, help="The run folder.", show_default="runs/RECIPE"),
    ] = None,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
    sync_bn: Annotated[
        bool,
        typer.Option(help="Under torchrun: batch-norm statistics over all processes."),
    ] = False,
) -> None:
    """Train a recipe, or go on with a run that was stopped; under torchrun in all its processes.

    Example: demur train digits-pgdat-rr epochs=30 head.weight=0.5
    """
    from demur.recipes import recipe as recipe_named
    from demur.runs import run_folder

    resolved = recipe_named(recipe, changes or [])
    folder = Path(out) if out else run_folder(recipe, resolved, changed=bool(changes))
    trained(resolved, folder, device, Path(data) if data else None, engine, sync_bn)


def trained(
    recipe: "Recipe",
    folder: Path,
    device: str,
    data: Path | None,
    engine: str = "auto",
    sync_bn: bool = False,
) -> "Run":
    """The finished run, with a progress bar while it trains."""
    from demur.cli.progress import TrainingBar, say, silence_other_ranks
    from demur.device import device_by_name
    from demur.distributed import current, init_distributed, launched
    from demur.engine import check_engine
    from demur.runs import Run
    from demur.training import train as train_recipe

    check_engine(engine)
    if not launched():  # else the leading process looks, and the others may not see the folder
        Run.check(folder, recipe)
        if Run(folder).finished:
            say(f"{folder} is trained already")
            return Run(folder)
    with (
        init_distributed(device_by_name(device)) as place,
        TrainingBar(f"train {folder.name}") as bar,
    ):
        silence_other_ranks()
        run = train_recipe(recipe, folder, place, data, bar.watch, engine, sync_bn, say)
        leads = current().is_leader
    if leads:  # the others may be on machines that do not see the folder
        say(f"{folder}: {_choice(run.checkpoint, recipe.epochs)}")
    return run


def _choice(chosen: dict[str, Any], epochs: int) -> str:
    if chosen["selection_split"] is None:
        return f"the last of {epochs} epochs is kept"
    value = (
        f"{100 * chosen['value']:.1f}% of {chosen['selection_split']} images right under the judge"
    )
    return f"epoch {chosen['epoch']} of {epochs} chosen, {value}"
