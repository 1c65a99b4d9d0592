"""demur train, demur retrofit for a head on somebody's net, and demur data get."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, Verify, app, option, split_names
from demur.errors import BadInput, suggestion
from demur.files.output_paths import output_folder

if TYPE_CHECKING:
    from demur.recipes import Recipe
    from demur.runs import Run


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (demur list recipes) or @FILE.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    out: Annotated[
        str | None, option("The run folder.", callback=output_folder("run"), shown="runs/RECIPE")
    ] = None,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
    log: Annotated[str, option("More logs: csv, tensorboard, mlflow, wandb or MODULE:NAME.")] = "",
    verify: Verify = False,
) -> None:
    """Train a recipe; resumes where it was stopped. Runs data-parallel under torchrun.

    data=PATH takes your own images: a folder per class, a CSV of paths, or an npz.

    Example: demur train digits-pgdat-rr epochs=30 head.weight=0.5
    """
    from demur.recipes import recipe as recipe_named
    from demur.runs import run_folder
    from demur.spec.importing import allow_import, is_import_path

    where = Path(data) if data else None
    resolved = with_data(recipe_named(recipe, changes or []), where, verify)
    folder = Path(out) if out else run_folder(recipe, resolved, changed=bool(changes))
    logs = split_names(log)
    for one in filter(is_import_path, logs):
        allow_import(one)
    train_run(resolved, folder, device, where, engine, logs)


def with_data(recipe: "Recipe", folder: Path | None = None, verify: bool = False) -> "Recipe":
    """Return the recipe after a user's own images are read, with a progress bar and a report."""
    import os
    from dataclasses import replace

    from demur.cli.progress import CountBar, on_message

    if verify:
        recipe.data.verify(folder)
    if os.environ.get("RANK", "0") != "0":  # torchrun: rank 0 reports
        return replace(recipe, data=recipe.data.prepared())
    with CountBar("read images", "images") as bar:
        return replace(recipe, data=recipe.data.prepared(bar.on_progress, on_message))


def train_run(
    recipe: "Recipe", folder: Path, device: str, data: Path | None, engine: str = "auto",
    logs: tuple[str, ...] = (),
) -> "Run":  # fmt: skip
    """Train a recipe in a folder with a progress bar and return the finished run."""
    from demur.cli.progress import TrainingBar, on_message, silence_other_ranks
    from demur.data import OwnImages
    from demur.distributed import current, init_distributed, launched
    from demur.engine import check_engine
    from demur.numerics import device_by_name
    from demur.runs import Run
    from demur.training import check_trainable
    from demur.training import train as train_recipe
    from demur.training.step import expectations

    check_engine(engine)
    if not launched():  # else rank 0 checks: the others may not share its disk
        Run.check(folder, recipe)
        if Run(folder).has_weights:
            Run(folder).tidy_finished()
            on_message(f"{folder} is trained already")
            return Run(folder)
        if isinstance(recipe.data, OwnImages):
            splits = recipe.data.load(data)
            check_trainable(recipe, splits)
            for sentence in expectations(recipe, splits["fit"], device_by_name(device)):
                on_message(sentence)
    with (
        init_distributed(device_by_name(device)) as rank_device,
        TrainingBar(f"train {folder.name}") as bar,
    ):
        silence_other_ranks()
        run = train_recipe(
            recipe, folder, rank_device, data, bar.on_progress, engine, on_message, logs
        )
        is_leader = current().is_leader
    if is_leader:  # the other ranks may not share its disk
        for sentence in _outcome(run, data):
            on_message(f"{folder}: {sentence}")
    return run


def _outcome(run: "Run", data: Path | None) -> Iterator[str]:
    """Yield which epoch was selected with its accuracies, and what to try at chance level."""
    from demur.attacks import Clean
    from demur.calibrate import ChanceTest

    checkpoint, recipe = run.checkpoint, run.recipe
    split = recipe.selection_split
    if split is None:
        yield f"the last of {recipe.epochs} epochs is stored"
        return
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    line, y = json.loads(lines[checkpoint["epoch"] - 1]), recipe.data.load(data)[split].y
    clean, classes = line[f"{split}_clean"], recipe.data.domain.classes
    attacked = f", attacked {100 * line[f'{split}_robust']:.1f}%"
    yield (
        f"epoch {checkpoint['epoch']} of {recipe.epochs} is stored: clean {100 * clean:.1f}%"
        f"{'' if isinstance(recipe.validation_attack, Clean) else attacked} of {len(y)} {split} "
        f"images, chance {100 / classes:.1f}%"
    )
    chance = ChanceTest.of(round(clean * len(y)), y.numpy(), classes, split)
    if not chance.passed:
        yield chance.advice


@app.command()
def retrofit(
    model: Annotated[
        str, typer.Argument(help="module:function that returns the trained net; it is imported.")
    ],
    changes: Annotated[list[str], typer.Argument(metavar="data=PATH [KEY=VALUE]...")],
    layer: Annotated[
        str, option("Layer whose output the head reads.", shown="the penultimate")
    ] = "",
    out: Annotated[
        str | None,
        option("The run folder.", callback=output_folder("run"), shown="runs/retrofit-NAME"),
    ] = None,
    guard: Annotated[
        str | None,
        option("The folder of the guard.", callback=output_folder("guard"), shown="guards/RUN"),
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    verify: Verify = False,
) -> None:
    """Learn an R-Con head on a frozen net, compare it with the net's confidence, export a guard.

    Give images that the net was not trained on.

    Example: demur retrofit my_nets:load data=photos size=64
    """
    from demur.cli.evaluate import load_run
    from demur.cli.guard import report_guard
    from demur.cli.progress import CountBar, on_message
    from demur.guards import Guard
    from demur.guards.bundle import check_target
    from demur.training.retrofitting import compare, retrofit_recipe

    if not any(change.startswith("data=") for change in changes):
        raise BadInput("a retrofit needs images; name them with data=PATH")
    recipe = retrofit_recipe(model, changes, layer)
    folder = Path(out) if out else Path("runs") / f"retrofit-{model.rpartition(':')[2]}"
    bundle = Path(guard) if guard else Path("guards") / folder.name
    check_target(bundle)
    run = train_run(with_data(recipe, verify=verify), folder, device, None)
    loaded = load_run(str(run.path), device, None)
    with CountBar("compare", "images") as bar:
        found = compare(loaded, bar.on_progress)
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), **found.to_json()}, indent=2))
    else:
        lines = [one.sentence for one in found.comparisons]
        typer.echo("\n".join([f"verdict: {found.verdict}", *lines, found.advice]))
    made = Guard.from_run(run, device=device)
    made.save(bundle)
    report_guard(made, bundle)
    module = model.partition(":")[0]
    serve = shlex.join(["demur", "serve", str(bundle)])
    on_message(f"its net is your code, so allow that: DEMUR_MODULES={module} {serve}")


data_app = typer.Typer(
    name="data",
    help="Download a published data set.\n\nExample: demur data get cifar10",
    no_args_is_help=True,
)
app.add_typer(data_app, hidden=True)  # error messages and the guides name it

MB = 10**6


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")], data: DataFolder = None
) -> None:
    """Download a data set from its authors, or check the files that are there.

    Example: demur data get cifar10 --data datasets
    """
    from demur.cli.progress import CountBar, on_message
    from demur.data import cifar
    from demur.files.checked_files import exclusive_lock
    from demur.files.output_paths import check_output_folder

    if (published := cifar.PUBLISHED.get(name)) is None:
        known = suggestion(name, cifar.PUBLISHED)
        raise BadInput(f"no data set to download is called {name!r}; {known}")
    folders = cifar.search_folders(Path(data) if data else None)
    if not folders:
        raise BadInput("there is no home folder for data; name a folder with --data DIR")
    folder = folders[0]
    found, origin = cifar.find_complete(published, folder), "already there and complete"
    if found is None:
        check_output_folder(str(folder))
        with exclusive_lock(folder), CountBar(f"get {name}", "MB") as bar:
            found = cifar.download(
                published, folder, lambda done, total: bar.on_progress(done // MB, total // MB)
            )
        origin = f"fetched from {published.archive}"
    on_message(f"{published.title} is in {found}: {origin}")
