"""demur table."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, app, split_names
from demur.errors import BadInput
from demur.files.output_paths import check_archive_folder, check_output_file
from demur.paper.commands_paper import (
    RUNS_FOLDER,
    Kept,
    Runs,
    RunSource,
    Scale,
    paper_tables,
    paper_text,
    reading_factories,
    training_factories,
    verdict_text,
)

if TYPE_CHECKING:
    from demur.paper.measure import TrainingResult
    from demur.paper.tables import Table


TableNames = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME... [KEY=VALUE]...",
        help="Tables of the paper (1-13, all or text), verdicts, or one of demur list tables.",
    ),
]

MissingFrom = Annotated[
    str | None,
    typer.Option(help="Compute only cells of the paper that runs of this folder leave empty."),
]
FirstSeed = Annotated[
    int, typer.Option(min=0, help="The first seed, to split seeds over machines.")
]
Archive = Annotated[
    str | None,
    typer.Option(callback=check_archive_folder, help="Also archive each run into this folder."),
]


@app.command()
def table(
    names: TableNames,
    scale: Scale = None,
    kept: Kept = None,
    runs: Runs = RUNS_FOLDER,
    only: Annotated[str, typer.Option(help="Only these nets, such as pgdat,pgdat-rr.")] = "",
    missing_from: MissingFrom = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings per recipe.")] = 1,
    first_seed: FirstSeed = 0,
    archive: Archive = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=check_output_file, help="Also write the output to this file."
        ),
    ] = None,
    as_json: AsJson = False,
    latex: Annotated[
        bool, typer.Option("--latex", help="Print LaTeX instead of Markdown.")
    ] = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Make a table: train, attack and score what is missing; resumes where it was stopped.

    Tables of the paper have our numbers beside the published ones. Others compare recipes over
    seeds (--only, --seeds, changes); on several machines, use --archive on each and then --kept.

    Example: demur table 1 2 --scale smoke
    """
    source = RunSource(scale, kept, runs, device, data, engine, missing_from)
    form = _format(as_json, latex)
    changes = [word for word in names if "=" in word]
    chosen = [word for word in names if "=" not in word]
    tables = paper_tables(chosen)
    if tables is not None or chosen == ["verdicts"]:
        if changes or archive or seeds > 1 or first_seed or (only and tables is None):
            raise BadInput(
                "tables of the paper take no changes, --seeds or --archive; leave them out"
            )
        if tables is None:
            text, failures = verdict_text(source, form), list[str]()
        else:
            text, failures = paper_text(chosen, tables, split_names(only), source, form)
    else:
        name = _one_name(chosen)
        if scale is not None or missing_from is not None or latex or runs != RUNS_FOLDER:
            raise BadInput(
                f"--scale, --missing-from, --runs and --latex are for tables of the paper, not "
                f"{name}"
            )
        text, failures = _recipe_table(
            name, changes, only, seeds, first_seed, archive, source, form
        )
    _output(text, form, out)
    if failures:
        raise BadInput(failures[0])


def _format(as_json: bool, latex: bool) -> str:
    if as_json and latex:
        raise BadInput("the output has one format; leave out --json or --latex")
    return "json" if as_json else "latex" if latex else "markdown"


def _one_name(names: list[str]) -> str:
    """Return the only name; raise BadInput for several or none."""
    if len(names) != 1:
        raise BadInput("name one table, or tables of the paper by their numbers; demur list tables")
    return names[0]


def _recipe_table(
    name: str,
    changes: list[str],
    only: str,
    seeds: int,
    first_seed: int,
    archive: str | None,
    source: RunSource,
    form: str,
) -> tuple[str, list[str]]:
    """Return a table that compares recipes, and a sentence where lines of it failed."""
    from demur.paper.markdown import markdown
    from demur.paper.measure import measure_table
    from demur.version import code_version

    if any(change.startswith("seed=") for change in changes):
        raise BadInput("a table sets its seeds; say how many with --seeds")
    spec, kept = _table_spec(name, only, changes), source.kept
    _check_folders(kept, archive)
    if kept:
        factories = reading_factories(kept, source.device, source.data)
    else:
        factories = training_factories(source.device, source.data, source.engine, archive)
    lines = list(measure_table(spec, range(first_seed, first_seed + seeds), factories))
    empty = f"{kept} holds no record of what {name} asks for; name another folder" if kept else ""
    reasons = _failures(lines, empty)
    failures = [f"{len(reasons)} of {len(lines)} lines could not be made; {r}" for r in reasons]
    if form == "json":
        return json.dumps([asdict(line) for line in lines], indent=2, default=str), failures
    options = {"only": only, "seeds": seeds if seeds > 1 else None, "first-seed": first_seed}
    command = _command([*spec.command, name, *changes], options | {"kept": kept})
    return markdown(spec, lines, command, code_version()), failures


def _output(text: str, form: str, out: str | None) -> None:
    """Print a table and write it to a file."""
    from demur.files.atomic import write_text

    if form == "markdown":
        _show(text)
    else:
        typer.echo(text)
    if out:
        write_text(Path(out), text if text.endswith("\n") else text + "\n")


def _table_spec(name: str, only: str, changes: list[str]) -> "Table":
    """Return the named table, restricted to some lines and with its recipes changed."""
    from demur.paper.tables import table_by_name

    table, names = table_by_name(name), split_names(only)
    return (table.only(names) if names else table).with_changes(changes)


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

    from demur.report.terminal import terminal

    console = terminal()
    if console.is_terminal:
        console.print(Markdown(page))
    else:
        typer.echo(page)
