"""demur show."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from demur.cli.app import app
from demur.errors import BadInput, shorten, suggestion


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe, @FILE, or a run folder.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
) -> None:
    """Print a recipe with all its fields, or the recipe and records of a run.

    Example: demur show digits-pgdat-rr head.weight=0.5
    """
    from demur.recipes import RECIPES
    from demur.recipes import recipe as recipe_named
    from demur.runs import Run, runs_in
    from demur.spec import digest, lines

    is_run = any((path / "recipe.txt").is_file() for path in (Path(name), Path("runs") / name))
    if is_run and name not in RECIPES and not changes:
        _show_run(Run.open(name))
        return
    if is_run and name not in RECIPES:
        words = ["demur", "show", f"@{Run.open(name).path / 'recipe.txt'}", *(changes or [])]
        raise BadInput(f"{name} is a run, and changes go with a recipe: {shlex.join(words)}")
    if name not in RECIPES and not name.startswith("@"):
        known = suggestion(name, [*RECIPES, *(run.name for run in runs_in(Path("runs")))])
        raise BadInput(f"no recipe or run is called {shorten(name)!r}; {known}")
    recipe = recipe_named(name, changes or [])
    typer.echo(lines(recipe) + f"# digest {digest(recipe)}")


def _show_run(run: Any) -> None:
    """Print the recipe of a run, its selected checkpoint and its records."""
    from demur.report.commands import train_command
    from demur.spec import lines

    typer.echo(lines(run.recipe), nl=False)
    if not run.trained:
        typer.echo(f"# not trained to the end; resume it with: {train_command(run)}")
        return
    typer.echo("# checkpoint: " + json.dumps(run.checkpoint))
    typer.echo(f"# metrics.jsonl: {run.metrics_state}")
    if not run.has_weights:
        count = sum(len(run.records(split)) for split in run.recipe.data.splits)
        typer.echo(f"# an archive: no weights, {count} record{'s' if count != 1 else ''}")
    for record in run.records():
        typer.echo(f"# record {record.digest[:12]}  {record.label}: {record.metadata['spec']}")
