"""demur list and verify: names of every kind, what a run is, whether stored results agree."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, app, option
from demur.errors import BadInput, shorten, suggestion

if TYPE_CHECKING:
    from demur.recipes import Recipe

RUNS = "runs"
ABOUT = {
    "recipes": "what demur train takes",
    "attacks": "what demur attack takes",
    "objectives": "what an attack maximises",
    "criteria": "when an attack has succeeded",
    "rejectors": "scores that decide what to reject",
    "nets": "network architectures",
    "data": "data sets",
    "methods": "training frameworks, heads, labels and schedules",
    "augmentation": "transformations of training images",
    "models": "trained nets that come with demur",
    RUNS: "runs in ./runs or in another folder",
}
WORDS = {
    "Standard": "standard training",
    "PGDAT": "PGD-AT",
    "NoHead": "",
    **{name: f"with the {name} head" for name in ("RR", "EBD", "SNet", "ATRO", "CARL")},
    "ResNet8": "ResNet-8",
    "ResNet18": "ResNet-18",
    "WideResNet": "WideResNet-34-10",
}
RECIPES_HINT = "change any field: demur train cifar10-pgdat-snet head.weight=16 'data=CIFAR100()'"


@app.command("list")
def list_names(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A kind (recipes, attacks, runs ...), a recipe, @FILE or a run.",
            show_default="the kinds",
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="Another folder of the runs, changes of the recipe, or modules of rejectors.",
            metavar="[FOLDER | KEY=VALUE... | MODULE...]",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List recipes, attacks, objectives, rejectors, nets, methods or runs, or show one of them.

    A recipe is printed with all its fields, a run with its recipe and records.

    Example: demur list digits-pgdat-rr head.weight=0.5
    """
    words = more or []
    kinds = listings(Path(*words[:1]) if words else Path(RUNS), words)
    if name is not None and name not in kinds:
        if as_json:
            raise BadInput(f"--json goes with a kind, and {shorten(name)!r} is none; leave it out")
        _show(name, words)
        return
    if words and name != "rejectors" and (name != RUNS or len(words) > 1):
        again = shlex.join(["demur", "list", RUNS, words[0]])
        raise BadInput(f"a folder goes with runs only, and only one; write {again}")
    entries: Mapping[str, Any] = (
        {kind: {"entries": len(make()), "about": ABOUT[kind]} for kind, make in kinds.items()}
        if name is None
        else kinds[name]()
    )
    if not entries:
        folder = Path(words[0] if words else RUNS)
        problem = "holds no run" if folder.is_dir() else "is not a folder"
        raise BadInput(f"{folder} {problem}; train a run with demur train RECIPE")
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    width = max(map(len, entries))
    for entry, text in entries.items():
        typer.echo(f"{entry:{width}}  {_line(text)}")
    if name == "recipes":
        typer.echo(RECIPES_HINT)


def _line(entry: Any) -> str:
    """Format an entry: a description, a kind with its count, or the state of a run."""
    match entry:
        case {"entries": count, "about": about}:
            return f"{count:4}  {about}"
        case {"state": state, "records": count, "recipe": recipe}:
            return f"{state}, {count} record{'' if count == 1 else 's'}, {recipe}"
    return str(entry)


def listings(
    folder: Path, modules: Sequence[str] = ()
) -> dict[str, Callable[[], Mapping[str, Any]]]:
    """Return by kind a function that makes its names and descriptions."""
    from demur import attacks, data, methods, nets, recipes, rejectors
    from demur.runs.run import zoo_folder
    from demur.spec import Spec
    from demur.spec import show as text_of
    from demur.spec.importing import classes_in, modules_named

    example = recipes.RECIPES["digits-pgdat-rr"]

    def described(classes: Sequence[type[Spec]]) -> dict[str, str]:
        return {cls.__name__: (cls.__doc__ or "").splitlines()[0] for cls in classes}

    def own_rejectors() -> dict[str, str]:
        found = [classes_in(module, rejectors.Rejector) for module in (*modules, *modules_named())]
        known = {name: cls for classes in found for name, cls in classes.items()}
        return {name: (cls.__doc__ or "").splitlines()[0] for name, cls in known.items()}

    return {
        "recipes": lambda: {name: describe(spec) for name, spec in recipes.RECIPES.items()},
        "attacks": lambda: {
            name: text_of(make(example)) for name, make in recipes.NAMED_ATTACKS.items()
        },
        "objectives": lambda: described(attacks.OBJECTIVES),
        "criteria": lambda: described(attacks.CRITERIA),
        "rejectors": lambda: described(rejectors.REJECTORS) | own_rejectors(),
        "nets": lambda: described(nets.NETS),
        "data": lambda: described(data.DATASETS),
        "methods": lambda: described(
            [*methods.FRAMEWORKS, *methods.HEADS, *methods.LABELS, *recipes.SCHEDULES]
        ),
        "augmentation": lambda: described(data.AUGMENTS),
        "models": lambda: _runs(zoo_folder()),
        RUNS: lambda: _runs(folder),
    }


def describe(recipe: "Recipe") -> str:
    """Return a recipe in one line: method, net, epochs."""
    method = recipe.method
    words, head, net = (
        WORDS.get(type(part).__name__, type(part).__name__)
        for part in (method.framework, method.head, recipe.net)
    )
    words += " of the paper's code" if getattr(method.framework, "form", "") == "reference" else ""
    words += f" {head}" if head else ""
    extras = (", EMA" if recipe.ema else "") + (", AWP" if recipe.awp else "")
    return f"{words}, {net}, {recipe.epochs} epochs{extras}"


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of a folder by name: state, number of records, recipe."""
    from demur.runs import runs_in

    found = {}
    for run in runs_in(folder):
        arrays = run.records_folder.glob("*.npz")  # of all splits, not read
        count = sum(path.with_suffix(".json").is_file() for path in arrays)
        archived = "an archive" if run.trained else "not trained to the end"
        state = "finished" if run.has_weights else archived
        try:
            recipe = describe(run.recipe)
        except BadInput as error:  # it cannot be read
            recipe = str(error)
        found[run.name] = {"state": state, "records": count, "recipe": recipe}
    return found


def _show(name: str, changes: list[str]) -> None:
    """Print a recipe with all its fields, or the recipe and records of a run."""
    from demur.recipes import RECIPES
    from demur.recipes import recipe as recipe_named
    from demur.runs import Run, runs_in
    from demur.runs.run import zoo_folder
    from demur.spec import digest, find_name, lines

    is_run = any((path / "recipe.txt").is_file() for path in (Path(name), Path(RUNS) / name))
    if is_run and name not in RECIPES:
        run = Run.open(name)
        if changes:
            words = ["demur", "list", f"@{run.path / 'recipe.txt'}", *changes]
            raise BadInput(f"{name} is a run, and changes go with a recipe: {shlex.join(words)}")
        _show_run(run)
        return
    if name not in RECIPES and not name.startswith("@"):
        for kind in ("attacks", "rejectors"):
            entries = listings(Path(RUNS))[kind]()
            if (entry := find_name(name, entries)) is not None:
                typer.echo(f"{entry}, one of demur list {kind}: {_line(entries[entry])}")
                return
        known = [*RECIPES, *ABOUT, *(run.name for run in runs_in(Path(RUNS)))]
        raise BadInput(
            f"no kind, recipe or run is called {shorten(name)!r}; {suggestion(name, known)}"
        )
    recipe = recipe_named(name, changes)
    typer.echo(lines(recipe) + f"# digest {digest(recipe)}")
    if (zoo_folder() / name).is_dir():
        typer.echo("# a trained net of this name comes with demur: demur list models")


def _show_run(run: Any) -> None:
    from demur.report.terminal import train_command
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


@app.command()
def verify(
    path: Annotated[
        str, typer.Argument(help="A run, archive, guard, record or state, or a folder of these.")
    ],
    n: Annotated[
        int, option("Images of each record to attack again, with weights.", "--n", min=0)
    ] = 8,
    key: Annotated[
        str | None, option("Public key (PEM) of whoever signed it.", shown="no signature")
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
) -> None:
    """Check that stored results agree with each other.

    Example: demur verify runs/digits-pgdat-rr --n 20
    """
    from demur.verification import verify as verify_path

    found = verify_path(path, n=n, key=key, device=device, data_folder=Path(data) if data else None)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    for line in [*map(str, found.findings), *found.lines()] if not as_json else ():
        typer.echo(line)
    if found.findings:
        count = len(found.findings)
        typer.echo(f"demur: {count} finding{'s'[: count - 1]} in {path}", err=True)
        raise typer.Exit(2)
