"""The command group `demur paper`: tables, figures and comparisons of recipes.

Imports of torch wait until a command runs, so that the help is fast.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import AsJson, DataFolder, Device, Engine, split_names
from demur.cli.listing import RUNS
from demur.errors import BadInput, suggestion
from demur.files.output_paths import check_output_file, output_file
from demur.paper import check_archive_folder
from demur.paper.study_commands import study_app

if TYPE_CHECKING:
    from demur.paper.cells import Cell
    from demur.paper.comparisons import Comparison, TrainingResult
    from demur.paper.paper_runs import Failure, RunSource
    from demur.paper.published import PaperTable
    from demur.paper.verdicts import Verdict

From = Annotated[
    str | None, typer.Option("--from", help="Read the runs of this folder; train nothing.")
]
Scale = Annotated[
    str | None, typer.Option(help="Compute at this scale: smoke, brief, short or paper.")
]
Runs = Annotated[str, typer.Option(help="Folder of the runs that are computed at a scale.")]
TableNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...", help="1 to 13, all, text or verdicts.", show_default="list the tables"
    ),
]
MissingFrom = Annotated[
    str | None, typer.Option(help="Compute only cells that the runs of this folder leave empty.")
]
OutFile = Annotated[
    str | None,
    typer.Option(
        "--out", "-o", callback=output_file("table"), help="Also write the output to this file."
    ),
]
paper_app = typer.Typer(
    name="paper",
    help="Make the tables, figures and studies of the paper.\n\n"
    "Example: demur paper table 2 --from results",
    no_args_is_help=True,
)


def add_to(app: typer.Typer) -> None:
    """Add the command group `paper` to an application."""
    app.add_typer(paper_app)


def _check_scale(scale: str | None, source: "RunSource", command: str) -> tuple[str, ...]:
    """Return the scales to read, by preference; raise BadInput without a way to get runs."""
    from demur.paper.cells import STORED_SCALES
    from demur.paper.scales import scale_by_name

    if scale is not None:
        return (scale_by_name(scale).name,)
    if source.read_from is None:
        raise BadInput(
            f"say where the runs are ({command} --from results), or at which scale to compute them "
            f"({command} --scale smoke)"
        )
    return STORED_SCALES


@paper_app.command()
def table(
    names: TableNames = None,
    scale: Scale = None,
    read_from: From = None,
    runs: Runs = RUNS,
    only: Annotated[str, typer.Option(help="Only these nets, such as pgdat,pgdat-rr.")] = "",
    missing_from: MissingFrom = None,
    out: OutFile = None,
    as_json: AsJson = False,
    latex: Annotated[
        bool, typer.Option("--latex", help="Print LaTeX instead of Markdown.")
    ] = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Make tables of the paper, with our numbers beside the published ones.

    Reads stored runs, or trains and attacks what is missing; resumes where it was stopped.

    Example: demur paper table 1 2 --scale smoke
    """
    from demur.paper.paper_runs import RunSource

    if not names:
        _print_names(_table_titles(), as_json)
        return
    if as_json and latex:
        raise BadInput("the output has one format; leave out --json or --latex")
    form = "json" if as_json else "latex" if latex else "markdown"
    source = RunSource(read_from, device, data, engine, runs)
    if names == ["verdicts"]:
        if only or missing_from is not None:
            raise BadInput("verdicts take no --only and no --missing-from; leave them out")
        _print_page(_verdict_page(source, scale, form), form, out)
        return
    text, failures = _table_page(names, source, scale, split_names(only), missing_from, form)
    _print_page(text, form, out)
    if failures:
        first = failures[0]
        raise BadInput(
            f"{len(failures)} nets could not be computed; {first.net.folder.name}: {first.error}"
        )


def _table_titles() -> dict[str, str]:
    from demur.paper.published import PAPER_TABLES

    return {
        **{str(number): table.title for number, table in PAPER_TABLES.items()},
        "text": "Results of the paper's text: AutoAttack, larger radii, the cost of the head",
        "verdicts": "Whether R-Con beats the confidence of its own net, from stored runs",
    }


def _print_names(titles: Mapping[str, str], as_json: bool = False) -> None:
    """Print names with their titles."""
    if as_json:
        typer.echo(json.dumps(titles, indent=2))
        return
    width = max(map(len, titles))
    for name, title in titles.items():
        typer.echo(f"{name:{width}}  {title}")


def _paper_tables(names: list[str]) -> "list[PaperTable]":
    """Return the tables with these numbers.

    `text` is the results that the paper gives in its text, `all` every numbered table and those.
    """
    from demur.paper.comparisons import COMPARISONS
    from demur.paper.published import PAPER_TABLES, TEXT_TABLES

    groups: dict[str, Sequence[PaperTable]] = {
        **{str(number): (table,) for number, table in PAPER_TABLES.items()},
        "all": (*PAPER_TABLES.values(), *TEXT_TABLES),
        "text": TEXT_TABLES,
    }
    for name in names:
        if name in COMPARISONS:
            words = shlex.join(["demur", "paper", "study", "recipes", name])
            raise BadInput(f"{name} compares recipes and is no table of the paper: {words}")
        if name.isdecimal() and name not in groups:
            raise BadInput(f"the paper has no table {name}; use 1 to 13, all, text or verdicts")
        if name not in groups:
            hint = suggestion(name, [*groups, "verdicts"])
            raise BadInput(f"there is no table {name!r}, or it is made alone; {hint}")
    return list(dict.fromkeys(table for name in names for table in groups[name]))


def _table_page(
    names: list[str],
    source: "RunSource",
    scale: str | None,
    nets: tuple[str, ...],
    missing_from: str | None,
    form: str,
) -> "tuple[str, list[Failure]]":
    """The tables in a format after what is missing is computed, and what failed.

    `nets` restricts them to the rows of some nets.
    """
    from demur.cli.progress import on_message
    from demur.paper.cells import STORED_SCALES, measure_cells, needs
    from demur.paper.published import rows_of

    tables, command = _paper_tables(names), shlex.join(["demur", "paper", "table", *names])
    if missing_from is not None and (scale is None or source.read_from is not None):
        raise BadInput("--missing-from says what to compute: use it with --scale, without --from")
    scales = _check_scale(scale, source, command)
    tables, filled = rows_of(tables, nets) if nets else tables, set()
    if missing_from is not None:
        every = list({*STORED_SCALES, *scales})
        stored = measure_cells(tables, Path(missing_from), source.open_run, on_message, every)
        filled = {cell.place for cell in stored if cell.measured is not None}
        if len(filled) == len(stored):
            raise BadInput(f"{missing_from} fills every cell of these tables; read it with --from")
    failures = source.compute(needs(tables, scale, filled), last_epoch=True) if scale else []
    cells = measure_cells(tables, source.folder, source.open_run, on_message, scales)
    given = {"only": ",".join(nets), "scale": scale, "from": source.read_from}
    command = _with_options(command, given | {"missing-from": missing_from})
    if form == "markdown" and names == ["all"] and not nets:
        return _whole_page(cells, command, source, scales), failures
    return _formatted(cells, command, form), failures


def _formatted(cells: "list[Cell]", command: str, form: str) -> str:
    from demur.paper.pages import latex_page, results_page

    if form == "json":
        return json.dumps([cell.to_json() for cell in cells], indent=2)
    return latex_page(cells, command) if form == "latex" else results_page(cells, command)


def _whole_page(
    cells: "list[Cell]", command: str, source: "RunSource", scales: tuple[str, ...]
) -> str:
    """The page of all tables, with the conclusions of the folder, disagreements and verdicts."""
    from demur.paper.pages import disagreement_section, results_page

    conclusions = source.folder / "conclusions.md"
    text = conclusions.read_text(encoding="utf-8") if conclusions.is_file() else ""
    sections = disagreement_section(cells), _verdict_section(source, scales)
    return results_page(cells, command, text, sections)


def _verdict_page(source: "RunSource", scale: str | None, form: str) -> str:
    """The verdicts on R-Con of the stored runs as Markdown or JSON."""
    if source.read_from is None:
        raise BadInput(
            "verdicts are made from stored runs; name their folder: demur paper table verdicts "
            "--from results"
        )
    if form == "latex":
        raise BadInput("verdicts have no LaTeX form; leave out --latex")
    scales = _check_scale(scale, source, "demur paper table verdicts")
    if form == "json":
        return json.dumps([one.to_json() for one in _verdicts(source, scales)], indent=2)
    return _verdict_section(source, scales)


def _verdict_section(source: "RunSource", scales: tuple[str, ...]) -> str:
    from demur.paper.verdicts import verdict_section

    return verdict_section(_verdicts(source, scales), source.folder.as_posix())


def _verdicts(source: "RunSource", scales: tuple[str, ...]) -> "list[Verdict]":
    from demur.paper.verdicts import measure_verdicts

    return measure_verdicts(source.stored(), scales)


def _with_options(command: str, options: dict[str, Any]) -> str:
    """Return a command with the options that have a value."""
    given = [(f"--{name}", str(value)) for name, value in options.items() if value]
    return " ".join([command, *(shlex.quote(word) for pair in given for word in pair)])


def _print_page(text: str, form: str, out: str | None) -> None:
    """Print a page, Markdown rendered on a terminal, and write it to a file."""
    from rich.markdown import Markdown

    from demur.files.checked_files import write_text
    from demur.report.terminal import terminal

    console = terminal()
    if form == "markdown" and console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text)
    if out:
        write_text(Path(out), text if text.endswith("\n") else text + "\n")


@paper_app.command()
def claims(
    read_from: Annotated[
        str, typer.Option("--from", help="Folder with claims.toml and the runs.")
    ] = "results",
) -> None:
    """Compute every number in the prose of README.md and of the conclusions from its source.

    Prints a line for each. The exit code is 1 where the text and a source differ, where a phrase of
    the claims is gone, or where a number has no source and is no setting.

    Example: demur paper claims --from results
    """
    from demur.paper.claims import check_claims

    report = check_claims(Path(read_from))
    for one in report.checked:
        typer.echo(one)
    count = f"{len(report.checked)} numbers have a source, {len(report.settings)} are settings"
    typer.echo(f"{count}, {len(report.problems)} problems")
    for problem in report.problems:
        typer.echo(f"demur: {problem}", err=True)
    if report.problems:
        raise typer.Exit(1)


@paper_app.command()
def figure(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Names or numbers of figures, or all.",
            show_default="list the figures",
        ),
    ] = None,
    scale: Scale = None,
    read_from: From = None,
    runs: Runs = RUNS,
    out: Annotated[
        str, typer.Option("--out", "-o", callback=check_archive_folder, help="Folder to write to.")
    ] = "figures",
    formats: Annotated[str, typer.Option("--format", help="Of pdf,svg,png.")] = "pdf,svg,png",
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Draw figures of the paper from stored runs, or from runs that are computed at a scale.

    Each has its files and its caption as text. What has no record is named, the others are drawn.

    Example: demur paper figure tau reliability --from results -o figures
    """
    from demur.paper.figures import (
        FIGURES,
        MissingRecord,
        draw_figure,
        figure_needs,
        figures_by_name,
    )
    from demur.paper.paper_runs import RunSource
    from demur.report.page import check_installed

    if not names:
        _print_names({one.name: f"Figure {one.number}: {one.title}" for one in FIGURES.values()})
        return
    chosen, kinds = figures_by_name(names), _formats(formats)
    source = RunSource(read_from, device, data, engine, runs)
    scales = _check_scale(scale, source, shlex.join(["demur", "paper", "figure", *names]))
    check_installed()
    failures = source.compute(figure_needs(chosen, scale)) if scale else []
    stored = source.stored() if any(one.evidence for one in chosen) else None
    missing = 0
    for one in chosen:
        try:
            drawn = draw_figure(one, stored, scales, kinds)
        except MissingRecord as reason:
            missing += 1
            typer.echo(f"demur: figure {one.name} is not drawn: {reason}", err=True)
            continue
        _write_figure(Path(out), one.name, f"Figure {one.number}. {drawn.caption}", drawn.files)
    for failure in failures:
        typer.echo(f"demur: {failure.net.folder.name}: {failure.error}", err=True)
    if missing or failures:
        raise typer.Exit(2)


def _formats(text: str) -> list[str]:
    """Return the formats of a comma-separated list; raise BadInput for an unknown one."""
    from demur.paper.figures import FORMATS

    for name in (names := list(dict.fromkeys(split_names(text)))):
        if name not in FORMATS:
            raise BadInput(f"figures have no format {name!r}; {suggestion(name, FORMATS)}")
    if not names:
        raise BadInput("--format is empty; write formats, such as pdf,svg")
    return names


def _write_figure(folder: Path, name: str, caption: str, files: dict[str, bytes]) -> None:
    """Write the files of a figure and its caption, and print them."""
    from demur.files.checked_files import write_bytes, write_text

    targets = {kind: folder / f"{name}.{kind}" for kind in (*files, "txt")}
    for kind, target in targets.items():
        check_output_file(str(target), kind)
    for kind, content in files.items():
        write_bytes(targets[kind], content)
    write_text(folder / f"{name}.txt", caption + "\n")
    typer.echo(f"{folder / name} ({', '.join(files)}): {caption}")


@study_app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="The comparison.", show_default="list the comparisons")
    ] = None,
    changes: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    read_from: From = None,
    only: Annotated[str, typer.Option(help="Only these recipes, such as pgdat,pgdat-rr.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings per recipe.")] = 1,
    first_seed: Annotated[
        int, typer.Option(min=0, help="The first seed, to split seeds over machines.")
    ] = 0,
    archive: Annotated[
        str | None,
        typer.Option(callback=check_archive_folder, help="Also archive each run into this folder."),
    ] = None,
    out: OutFile = None,
    as_json: AsJson = False,
    device: Device = "auto",
    data: DataFolder = None,
    engine: Engine = "auto",
) -> None:
    """Compare recipes over seeds: train, attack and score what is missing; resumes after a stop.

    On several machines, use --archive on each and then --from.

    Example: demur paper study recipes methods-digits --only pgdat,pgdat-rr --seeds 2
    """
    from demur.paper.comparisons import COMPARISONS, measure_comparison
    from demur.paper.pages import comparison_page
    from demur.paper.paper_runs import RunSource
    from demur.version import code_version

    if name is None:
        _print_names({one: table.title for one, table in COMPARISONS.items()}, as_json)
        return
    spec = _comparison(name, only, changes or [])
    source = RunSource(read_from, device, data, engine, archive=archive)
    which = range(first_seed, first_seed + seeds)
    failed = source.compute(spec.needs(which))
    keep = source.steps().keep
    results = measure_comparison(spec, which, source.stored(not failed), failed, keep)
    failures = _failures(results, name, read_from)
    if as_json:
        text = json.dumps([asdict(result) for result in results], indent=2, default=str)
    else:
        given = {"only": only, "seeds": seeds if seeds > 1 else 0, "first-seed": first_seed}
        words = shlex.join([*spec.command, name, *(changes or [])])
        command = _with_options(words, given | {"from": read_from})
        text = comparison_page(spec, results, command, code_version())
    _print_page(text, "json" if as_json else "markdown", out)
    if failures:
        raise BadInput(f"{len(failures)} of {len(results)} lines could not be made; {failures[0]}")


def _comparison(name: str, only: str, changes: list[str]) -> "Comparison":
    """Return the named comparison, restricted to some recipes and with its recipes changed."""
    from demur.paper.comparisons import comparison_by_name

    table, names = comparison_by_name(name), split_names(only)
    if any(change.startswith("seed=") for change in changes):
        raise BadInput("the comparison sets its seeds; say how many with --seeds")
    return (table.only(names) if names else table).with_changes(changes)


def _failures(results: "list[TrainingResult]", name: str, read_from: str | None) -> list[str]:
    """Return why lines failed; raise BadInput with the first reason where no line has a number."""
    reasons = [f"{one.entry}, seed {one.seed}: {one.failure}" for one in results if one.has_failed]
    if not any(one.rows for one in results):
        if reasons:
            raise BadInput(reasons[0])
        if read_from:
            raise BadInput(
                f"{read_from} holds no record of what {name} asks for; name another folder"
            )
    return reasons


paper_app.add_typer(study_app)
