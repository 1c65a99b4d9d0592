"""demur list."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, app
from demur.errors import BadInput, suggestion

if TYPE_CHECKING:
    from demur.recipes import Recipe
    from demur.runs import Run

RUNS = "runs"
ABOUT = {
    "recipes": "what demur train takes",
    "attacks": "what demur attack takes",
    "objectives": "what an attack maximises",
    "criteria": "when an attack has succeeded",
    "rejectors": "scores that inputs are rejected by",
    "nets": "nets of a recipe",
    "data": "data sets of a recipe",
    "methods": "frameworks, heads and schedules of training",
    "tables": "what demur table makes",
    RUNS: "trained runs in ./runs or in a folder",
}
MOST = 3  # changes of a recipe that are named


@app.command("list")
def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(help="recipes, attacks, rejectors, runs ...", show_default="the kinds"),
    ] = None,
    folder: Annotated[
        str, typer.Argument(help="Where runs are, if runs are listed.", metavar="[FOLDER]")
    ] = RUNS,
    as_json: AsJson = False,
) -> None:
    """List recipes, attacks, objectives, rejectors, nets, methods, tables or runs.

    Example: demur list attacks
    """
    tables = _tables(Path(folder))
    if RUNS not in (folder, kind):
        raise BadInput(f"only runs are listed from a folder; write demur list runs {folder}")
    if kind is None:
        entries: Mapping[str, Any] = {name: _counted(name, make()) for name, make in tables.items()}
    elif kind in tables:
        entries = tables[kind]()
    else:
        raise BadInput(f"nothing to list under {kind!r}; {suggestion(kind, tables)}")
    if not entries:
        lack = "holds no run" if Path(folder).is_dir() else "is no folder"
        raise BadInput(f"{folder} {lack}; train a run with demur train RECIPE")
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    width = max(len(name) for name in entries)
    for name, text in entries.items():
        typer.echo(f"{name:{width}}  {_line(text)}")


def _counted(kind: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """How many there are of a kind, and what they are."""
    return {"entries": len(entries), "about": ABOUT[kind]}


def _line(entry: Any) -> str:
    """What is told of a name: a text, how many there are of a kind, or how far a run is."""
    match entry:
        case {"entries": count, "about": words}:
            return f"{count:4}  {words}"
        case {"state": state, "records": count, "recipe": recipe}:
            return f"{state}, {count} record{'' if count == 1 else 's'}, {recipe}"
    return str(entry)


def _tables(folder: Path) -> dict[str, Callable[[], Mapping[str, Any]]]:
    from demur import attacks, data, methods, nets, recipes, rejectors
    from demur.paper.tables import TABLES
    from demur.spec import Spec
    from demur.spec import show as text_of

    example = recipes.RECIPES["digits-pgdat-rr"]

    def described(classes: tuple[type[Spec], ...]) -> dict[str, str]:
        return {cls.__name__: (cls.__doc__ or "").splitlines()[0] for cls in classes}

    return {
        "recipes": lambda: {name: describe(spec) for name, spec in recipes.RECIPES.items()},
        "attacks": lambda: {
            name: text_of(make(example)) for name, make in recipes.NAMED_ATTACKS.items()
        },
        "objectives": lambda: described(attacks.OBJECTIVES),
        "criteria": lambda: described(attacks.CRITERIA),
        "rejectors": lambda: described(rejectors.REJECTORS),
        "nets": lambda: described(nets.NETS),
        "data": lambda: described(data.DATASETS),
        "methods": lambda: described(methods.FRAMEWORKS + methods.HEADS + methods.SCHEDULES),
        "tables": lambda: {name: table.title for name, table in TABLES.items()},
        RUNS: lambda: _runs(folder),
    }


def describe(recipe: "Recipe") -> str:
    """Return a recipe in one line: method, data, net, epochs."""
    method, head = recipe.method, type(recipe.method.head).__name__
    parts = [
        type(method.framework).__name__ + ("" if head == "NoHead" else f" + {head}"),
        f"{type(recipe.data).__name__}, {type(recipe.net).__name__}, {recipe.epochs} epochs",
        *(["EMA"] if recipe.ema else []),
        *(["AWP"] if recipe.awp else []),
    ]
    return ", ".join(parts)


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs of a folder by name: how far they are, how many records, of which recipe."""
    from demur.runs import runs_in

    return {
        run.name: {"state": _state(run), "records": _records(run), "recipe": _recipe_of(run)}
        for run in runs_in(folder)
    }


def _state(run: "Run") -> str:
    if run.finished:
        return "finished"
    return "an archive" if run.trained else "not trained to the end"


def _records(run: "Run") -> int:
    """How many records of any images there are, without reading them."""
    return sum(path.with_suffix(".json").is_file() for path in run.records_folder.glob("*.npz"))


def _recipe_of(run: "Run") -> str:
    """The recipe in short, or why it cannot be read."""
    try:
        return _in_short(run.recipe)
    except BadInput as error:
        return str(error)


def _in_short(recipe: "Recipe") -> str:
    """The nearest recipe that has a name, and in which fields this one differs."""
    from demur.recipes import RECIPES
    from demur.spec import differences

    alike = {name: known for name, known in RECIPES.items() if _kinds(known) == _kinds(recipe)}
    changes = {name: differences(recipe, known) for name, known in (alike or RECIPES).items()}
    nearest = min(changes, key=lambda name: len(changes[name]))
    fields = [phrase.partition(":")[0] for phrase in changes[nearest]]
    if not fields:
        return nearest
    more = f" and {len(fields) - MOST} more" if len(fields) > MOST else ""
    return f"{nearest} with other {', '.join(fields[:MOST])}{more}"


def _kinds(recipe: "Recipe") -> list[type]:
    """What data, net and method a recipe is about, whatever their settings."""
    method = recipe.method
    return [type(part) for part in (recipe.data, recipe.net, method.framework, method.head)]
