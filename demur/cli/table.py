"""demur table."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, app, split_names
from demur.cli.output_paths import check_archive_folder, check_output_file
from demur.errors import BadInput

if TYPE_CHECKING:
    from demur.paper.measure import Factories, TrainingResult
    from demur.paper.tables import Table


@app.command()
def table(
    name: Annotated[
        str,
        typer.Argument(help="A name of demur list tables, a table of the paper (1-13), or all."),
    ],
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    only: Annotated[str, typer.Option(help="Only these lines, such as pgdat,pgdat-rr.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings per recipe.")] = 1,
    first_seed: Annotated[
        int, typer.Option(min=0, help="The first seed, to split seeds over machines.")
    ] = 0,
    kept: Annotated[
        str | None, typer.Option(help="Read the runs of this folder; train nothing.")
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(callback=check_archive_folder, help="Also archive each run into this folder."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=check_output_file, help="Write the table to this Markdown file."
        ),
    ] = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Make a table: train, attack and score what is missing; resumes where it was stopped.

    To build a table on several machines, use --archive on each and --kept on the collected folders.

    Tables of the paper are filled from the runs of --kept, beside the published numbers.

    Example: demur table methods-digits epochs=2 --only pgdat,pgdat-rr
    """
    if name == "all" or name.isdecimal():
        _show_paper_tables(name, kept, out, as_json, [*(changes or []), only])
        return
    from demur.paper.markdown import markdown
    from demur.paper.measure import measure_table
    from demur.version import code_version

    if any(change.startswith("seed=") for change in changes or []):
        raise BadInput("a table sets its seeds; say how many with --seeds")
    spec = _table_spec(name, only, changes or [])
    _check_folders(kept, archive)
    if kept:
        factories = _reading_factories(kept, device, data)
    else:
        factories = _training_factories(device, data, engine, archive)
    lines = list(measure_table(spec, range(first_seed, first_seed + seeds), factories))
    empty = f"{kept} holds no record of what {name} asks for; name another folder" if kept else ""
    failures = _failures(lines, empty)
    options = {"only": only, "seeds": seeds if seeds > 1 else None, "first-seed": first_seed}
    command = _command([*spec.command, name, *(changes or [])], options | {"kept": kept})
    page = markdown(spec, lines, command, code_version())
    _output(page, [asdict(line) for line in lines] if as_json else None, out)
    _raise_failures(failures, len(lines))


def _output(page: str, values: list[dict[str, Any]] | None, out: str | None) -> None:
    """Print JSON values if there are any, else the page; also write the page to a file."""
    from demur.runs.files import write_text

    if values is not None:
        typer.echo(json.dumps(values, indent=2, default=str))
    else:
        _show(page)
    if out:
        write_text(Path(out), page)


def _show_paper_tables(
    name: str, kept: str | None, out: str | None, as_json: bool, unused: list[str]
) -> None:
    """Show one table of the paper or all, filled from stored runs."""
    from demur.cli.evaluate import load_run
    from demur.cli.progress import on_message
    from demur.paper.cells import measure_cells
    from demur.paper.published import PAPER_TABLES
    from demur.paper.results_page import results_page

    if name != "all" and int(name) not in PAPER_TABLES:
        raise BadInput(f"the paper has no table {name}; use a number from 1 to 13, or all")
    if any(unused):
        raise BadInput("tables of the paper take no changes and no --only; name one table")
    if not kept:
        raise BadInput(f"say where the runs are: demur table {name} --kept results")
    tables = [*PAPER_TABLES.values()] if name == "all" else [PAPER_TABLES[int(name)]]
    cells = measure_cells(
        tables, Path(kept), lambda run: load_run(str(run.path), "cpu", None), on_message
    )
    conclusions = Path(kept) / "conclusions.md"
    text = conclusions.read_text(encoding="utf-8") if conclusions.is_file() else ""
    page = results_page(cells, f"demur table {name} --kept {kept}", text if name == "all" else "")
    _output(page, [cell.to_json() for cell in cells] if as_json else None, out)


def _table_spec(name: str, only: str, changes: list[str]) -> "Table":
    """Return the named table, restricted to some lines and with its recipes changed."""
    from demur.paper.tables import table_by_name

    table, names = table_by_name(name), split_names(only)
    return (table.only(names) if names else table).with_changes(changes)


def _raise_failures(failures: list[str], count: int) -> None:
    if failures:
        raise BadInput(f"{len(failures)} of {count} lines could not be made; {failures[0]}")


def _failures(lines: "list[TrainingResult]", empty: str) -> list[str]:
    """Return why lines failed; raise BadInput with the first reason where no line has a figure.

    `empty` is the message for no figure and no failure.
    """
    reasons = [
        f"{line.entry}, seed {line.seed}: {line.failure}" for line in lines if line.has_failed
    ]
    if not any(line.rows for line in lines) and (reasons or empty):
        raise BadInput(reasons[0] if reasons else empty)
    return reasons


def _check_folders(kept: str | None, archive: str | None) -> None:
    """Raise BadInput for an empty name, or for two folders that exclude each other."""
    if kept is not None and not kept.strip():
        raise BadInput("the name of the folder to read is empty; name a folder of runs")
    if archive and Path(archive).resolve() == Path("runs").resolve():
        raise BadInput(f"{archive} holds the runs themselves; name another folder for archives")
    if kept and archive:
        raise BadInput(
            "--kept only reads runs, and --archive copies new ones; leave out one of them"
        )


def _command(words: list[str], options: dict[str, Any]) -> str:
    """Return the command that makes the page, without options at their default."""
    given = [(f"--{name}", str(value)) for name, value in options.items() if value]
    return shlex.join([*words, *(word for pair in given for word in pair)])


def _show(page: str) -> None:
    """Print Markdown: rendered on a terminal, as it is elsewhere."""
    from rich.markdown import Markdown

    from demur.report.text import terminal

    console = terminal()
    if console.is_terminal:
        console.print(Markdown(page))
    else:
        typer.echo(page)


def _reading_factories(folder: str, device: str, data: str | None) -> "Factories":
    """Return factories that only read the stored runs of a folder."""
    from demur.cli.evaluate import load_run
    from demur.cli.progress import on_message
    from demur.paper.measure import stored_factories

    return stored_factories(
        Path(folder), lambda run: load_run(str(run.path), device, data), on_message
    )


def _training_factories(
    device: str, data: str | None, engine: str, archive: str | None
) -> "Factories":
    """Return factories that train and attack with progress bars, and archive if asked to."""
    from demur.attacks import Attack
    from demur.cli.evaluate import attack_and_report, load_run
    from demur.cli.train import train_run
    from demur.data import SplitName
    from demur.evaluate import ArchiveKeepsLess, LoadedRun, RecordOptions
    from demur.evaluate import archive as archive_run
    from demur.paper.measure import Factories
    from demur.runs import Record
    from demur.runs.record import record_path

    def keep(loaded: LoadedRun, scores: Sequence[str]) -> None:
        if archive:
            archive_run(loaded, Path(archive) / loaded.run.name, scores, again=True)

    def craft(loaded: LoadedRun, split: SplitName, label: str, attack: Attack) -> Record:
        record = attack_and_report(loaded, label, attack, RecordOptions(split))
        head_score, _ = loaded.run.recipe.head_rejector
        copies = Path(archive or "") / loaded.run.name / "records"
        if archive and not record_path(copies, record.label, split, record.digest).exists():
            # After every attack, so that a stop loses one attack at most. An earlier archive may
            # hold more scores than this one.
            with suppress(ArchiveKeepsLess):
                keep(loaded, [head_score])
        return record

    data_folder = Path(data) if data else None
    return Factories(
        train=lambda recipe, folder: train_run(recipe, folder, device, data_folder, engine),
        open=lambda run: load_run(str(run.path), device, data, engine),
        craft=craft,
        keep=keep,
    )
