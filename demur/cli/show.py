"""demur show and demur list."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from demur.cli.app import AsJson, app
from demur.errors import BadInput, suggestion


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe, @FILE, or a run folder.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
) -> None:
    """Print a recipe with every field, or what a run folder holds.

    Example: demur show digits-pgdat-rr head.weight=0.5
    """
    from demur.recipes import RECIPES
    from demur.recipes import recipe as recipe_named
    from demur.runs import Run
    from demur.spec import digest, lines

    is_run = any((path / "recipe.txt").is_file() for path in (Path(name), Path("runs") / name))
    if is_run and name not in RECIPES and not changes:
        _show_run(Run.open(name))
        return
    recipe = recipe_named(name, changes or [])
    typer.echo(lines(recipe) + f"# digest {digest(recipe)}")


def _show_run(run: Any) -> None:
    from demur.spec import lines

    typer.echo(lines(run.recipe), nl=False)
    if not run.trained:
        typer.echo("# not trained to the end")
        return
    typer.echo("# chosen: " + json.dumps(run.chosen))
    if not run.finished:
        count = sum(len(run.records(split)) for split in run.recipe.data.splits)
        typer.echo(f"# a slim copy: no weights, {count} record{'s' if count != 1 else ''}")
    for record in run.records():
        typer.echo(f"# record {record.digest[:12]}  {record.label}: {record.about['spec']}")


@app.command("list")
def list_names(
    kind: Annotated[str, typer.Argument(help="recipes, attacks, rejectors, methods ...")],
    as_json: AsJson = False,
) -> None:
    """List what has a name: recipes, attacks, goals, rejectors, nets, methods, tables and more.

    Example: demur list attacks
    """
    tables = _tables()
    if kind not in tables:
        raise BadInput(f"nothing to list under {kind!r}; {suggestion(kind, tables)}")
    entries = tables[kind]()
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    width = max(len(name) for name in entries)
    for name, text in entries.items():
        typer.echo(f"{name:{width}}  {text}")


def _tables() -> dict[str, Callable[[], dict[str, str]]]:
    from demur import attacks, data, methods, nets, recipes, rejectors
    from demur.paper.tables import TABLES
    from demur.spec import Spec
    from demur.spec import show as text_of

    example = recipes.RECIPES["digits-pgdat-rr"]

    def described(classes: tuple[type[Spec], ...]) -> dict[str, str]:
        return {cls.__name__: (cls.__doc__ or "").splitlines()[0] for cls in classes}

    return {
        "recipes": lambda: {name: text_of(spec) for name, spec in recipes.RECIPES.items()},
        "attacks": lambda: {
            name: text_of(make(example)) for name, make in recipes.NAMED_ATTACKS.items()
        },
        "goals": lambda: described(attacks.GOALS),
        "criteria": lambda: described(attacks.CRITERIA),
        "rejectors": lambda: described(rejectors.REJECTORS),
        "nets": lambda: described(nets.NETS),
        "data": lambda: described(data.DATASETS),
        "methods": lambda: described(methods.FRAMES + methods.HEADS + methods.SCHEDULES),
        "tables": lambda: {name: table.title for name, table in TABLES.items()},
    }
