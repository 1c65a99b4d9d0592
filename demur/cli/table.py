"""demur table."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, app, names_in
from demur.cli.output_paths import checked_file, checked_shelf
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.paper.measured import Factories, TrainingResult


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="A table's name (demur list tables).")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    only: Annotated[str, typer.Option(help="Some of its lines, such as pgdat,pgdat-rr.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each recipe.")] = 1,
    first_seed: Annotated[
        int, typer.Option(min=0, help="The first of them, to make others elsewhere.")
    ] = 0,
    kept: Annotated[
        str | None, typer.Option(help="Only read what a folder of runs holds, such as results.")
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(
            callback=checked_shelf, help="Also keep an archive of each training in this folder."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=checked_file, help="Write the page to this Markdown file."
        ),
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Make a table: train, attack and score what is not there yet; goes on where it was stopped.

    With --archive on one machine and --kept on another a table can be put together from several.

    Example: demur table methods-digits epochs=2 --only pgdat,pgdat-rr
    """
    from demur.paper.markdown import markdown
    from demur.paper.measured import measured
    from demur.paper.tables import table_by_name
    from demur.runs.files import write_text
    from demur.version import code_version

    if any(change.startswith("seed=") for change in changes or []):
        raise BadInput("a table takes seeds from --first-seed on; say how many with --seeds")
    whole, names = table_by_name(name), names_in(only)
    asked = (whole.only(names) if names else whole).changed(changes or [])
    _check_folders(kept, archive)
    factories = _kept(kept, device, data) if kept else _hands(device, data, engine, archive)
    lines = list(measured(asked, range(first_seed, first_seed + seeds), factories))
    nothing = f"{kept} holds no record of what {name} asks for; name another folder"
    refused = _refused(lines, nothing if kept else "")
    options = {"only": only, "seeds": seeds if seeds > 1 else None, "first-seed": first_seed}
    command = _command([name, *(changes or [])], options | {"kept": kept})
    page = markdown(asked, lines, command, code_version())
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=2, default=str))
    else:
        _show(page)
    if out:
        write_text(Path(out), page)
    if refused:
        raise BadInput(f"{len(refused)} of {len(lines)} lines could not be made; {refused[0]}")


def _refused(lines: "list[TrainingResult]", nothing: str) -> list[str]:
    """Why lines could not be made; with no figure at all, that is all there is to say."""
    reasons = [f"{line.entry}, seed {line.seed}: {line.failure}" for line in lines if line.refused]
    if not any(line.rows for line in lines) and (reasons or nothing):
        raise BadInput(reasons[0] if reasons else nothing)
    return reasons


def _check_folders(kept: str | None, archive: str | None) -> None:
    """Refuse folders that are none, or that do not go together."""
    if kept is not None and not kept.strip():
        raise BadInput("the name of the folder to read is empty; name one that holds runs")
    if archive and Path(archive).resolve() == Path("runs").resolve():
        raise BadInput(f"{archive} holds the runs themselves; name another folder for archives")
    if kept and archive:
        raise BadInput(
            "--kept reads what is there, and --archive copies what is made; leave out one"
        )


def _command(words: list[str], options: dict[str, Any]) -> str:
    """What makes the page, without the options that were left out."""
    given = [(f"--{name}", str(value)) for name, value in options.items() if value]
    return shlex.join(["demur", "table", *words, *(word for pair in given for word in pair)])


def _show(page: str) -> None:
    """Print a page, drawn where there is somebody to look at it."""
    from rich.markdown import Markdown

    from demur.report.text import terminal

    console = terminal()
    if console.is_terminal:
        console.print(Markdown(page))
    else:
        typer.echo(page)


def _kept(folder: str, device: str, data: str | None) -> "Factories":
    """What was trained and attacked before."""
    from demur.cli.evaluate import open_evaluator
    from demur.cli.progress import say
    from demur.paper.stored_runs import stored_factories

    return stored_factories(
        Path(folder), lambda run: open_evaluator(str(run.path), device, data), say
    )


def _hands(device: str, data: str | None, engine: str, archive: str | None) -> "Factories":
    """Trainings and attacks with progress bars, and archives if there is a folder for them."""
    from demur.attacks import Attack
    from demur.cli.evaluate import open_evaluator, record_of
    from demur.cli.train import trained
    from demur.data import SplitName
    from demur.evaluate import ArchiveKeepsLess, AttackOptions, Evaluator
    from demur.evaluate import archive as slimmed
    from demur.paper.measured import Factories
    from demur.runs import Record
    from demur.runs.record import record_path

    def keep(evaluator: Evaluator, scores: Sequence[str]) -> None:
        if archive:
            slimmed(evaluator, Path(archive) / evaluator.run.name, scores, again=True)

    def craft(evaluator: Evaluator, split: SplitName, label: str, attack: Attack) -> Record:
        record, (own, _) = (
            record_of(evaluator, label, attack, AttackOptions(split)),
            evaluator.run.recipe.head_rejector,
        )
        copies = Path(archive or "") / evaluator.run.name / "records"
        if archive and not record_path(copies, record.label, split, record.digest).exists():
            with suppress(
                ArchiveKeepsLess
            ):  # an earlier copy may hold more of the others than one score
                keep(evaluator, [own])  # now, so that being stopped costs no more than one attack
        return record

    where = Path(data) if data else None
    return Factories(
        train=lambda recipe, folder: trained(recipe, folder, device, where, engine),
        open=lambda run: open_evaluator(str(run.path), device, data, engine),
        craft=craft,
        keep=keep,
    )
