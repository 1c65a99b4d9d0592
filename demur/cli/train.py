"""demur train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import DataFolder, Device, app

if TYPE_CHECKING:
    from demur.recipes import Recipe
    from demur.runs import Run


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (demur list recipes) or @FILE.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    out: Annotated[
        str | None, typer.Option(help="The run folder.", show_default="runs/RECIPE")
    ] = None,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Train a recipe, or go on with a run that was stopped.

    Example: demur train digits-pgdat-rr epochs=30 head.weight=0.5
    """
    from demur.recipes import recipe as recipe_named
    from demur.runs import run_folder

    resolved = recipe_named(recipe, changes or [])
    folder = Path(out) if out else run_folder(recipe, resolved, changed=bool(changes))
    trained(resolved, folder, device, Path(data) if data else None)


def trained(recipe: "Recipe", folder: Path, device: str, data: Path | None) -> "Run":
    """The finished run, with a progress bar while it trains."""
    from demur.cli.progress import TrainingBar, console
    from demur.device import device_named
    from demur.runs import Run
    from demur.train import train as train_recipe

    Run.check(folder, recipe)
    if Run(folder).finished:
        console.print(f"{folder} is trained already")
        return Run(folder)
    with TrainingBar(f"train {folder.name}") as bar:
        run = train_recipe(recipe, folder, device_named(device), data, bar.watch)
    chosen = run.chosen
    console.print(
        f"{folder}: epoch {chosen['epoch']} of {recipe.epochs} chosen, "
        f"val accuracy {100 * chosen['value']:.1f}% under the judge"
    )
    return run
