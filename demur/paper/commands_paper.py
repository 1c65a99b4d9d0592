"""The paper's tables for demur table, and demur figure; how both train, attack and read runs."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demur.cli.app import DataFolder, Device, Engine, app, split_names
from demur.errors import BadInput, suggestion
from demur.files.output_paths import check_archive_folder

if TYPE_CHECKING:
    from demur.paper.cells import Cell, Need
    from demur.paper.compute import Job
    from demur.paper.measure import Factories
    from demur.paper.published import PaperTable
    from demur.paper.verdicts import Verdict

RUNS_FOLDER = "runs"
Scale = Annotated[
    str | None, typer.Option(help="Compute at this scale: smoke, brief, short or paper.")
]
Kept = Annotated[str | None, typer.Option(help="Read the runs of this folder; train nothing.")]
Runs = Annotated[str, typer.Option(help="Folder of the runs that are computed at a scale.")]
Names = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="Names or numbers of figures, or all.")
]


@dataclass(frozen=True)
class RunSource:
    """Where runs come from: stored ones of `kept`, or computed at `scale` into `runs`."""

    scale: str | None
    kept: str | None
    runs: str
    device: str
    data: str | None
    engine: str
    missing_from: str | None = None  # compute only cells that the runs of this folder leave empty

    def check(self, command: str) -> None:
        """Raise BadInput unless there is a way to get runs."""
        from demur.paper.scales import scale_by_name

        if self.scale is not None:
            scale_by_name(self.scale)
        if self.scale is None and self.kept is None:
            raise BadInput(
                f"say where the runs are ({command} --kept results), or at which scale to compute "
                f"them ({command} --scale smoke)"
            )
        if self.missing_from is not None and (self.scale is None or self.kept is not None):
            raise BadInput(
                "--missing-from says what to compute: use it with --scale, without --kept"
            )
        if self.kept is not None and self.runs != RUNS_FOLDER:
            raise BadInput("--kept only reads runs, and --runs is for new ones; leave out one")
        if self.kept is None:
            check_archive_folder(self.runs)
        elif not self.kept.strip():
            raise BadInput("the name of the folder to read is empty; name a folder of runs")

    @property
    def folder(self) -> Path:
        """The folder of the runs to read."""
        return Path(self.runs if self.kept is None else self.kept)

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales to read, by preference."""
        from demur.paper.cells import STORED_SCALES

        return STORED_SCALES if self.scale is None else (self.scale,)

    @property
    def options(self) -> str:
        """The options that say so, as the user types them."""
        parts = [f"--scale {self.scale}"] if self.scale else []
        parts += [f"--kept {self.kept}"] if self.kept is not None else []
        parts += [f"--missing-from {self.missing_from}"] if self.missing_from is not None else []
        return " ".join(parts)

    def open_run(self, run: Any) -> Any:
        """Open a run for evaluation."""
        from demur.cli.evaluate import load_run

        return load_run(str(run.path), self.device, self.data, self.engine)

    def compute(self, needs: "Iterable[Need]", last_epoch: bool) -> list[str]:
        """Train and attack what is missing, unless runs are only read; return what failed."""
        from demur.paper.compute import compute

        if self.kept is not None or self.scale is None:
            return []
        factories = training_factories(self.device, self.data, self.engine, None)
        return compute(needs, self.scale, Path(self.runs), factories, _show_job, last_epoch)


def _show_job(job: "Job") -> None:
    from demur.cli.progress import on_message

    left = "" if job.seconds_left is None else f", {_duration(job.seconds_left)} left"
    on_message(f"{job.number} of {job.count}{left}: {job.name}, {job.run}")


def _duration(seconds: float) -> str:
    """Seconds in words: 40 s, 12 min or 3.5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def paper_tables(names: list[str]) -> "list[PaperTable] | None":
    """Return the tables of the paper with these numbers; None for names of other tables.

    `all` is every numbered table, `text` the results that the paper gives in its text.
    """
    from demur.paper.published import PAPER_TABLES, TEXT_TABLES

    if not all(name.isdecimal() or name in ("all", "text") for name in names):
        return None
    groups: dict[str, Sequence[PaperTable]] = {
        **{str(number): (table,) for number, table in PAPER_TABLES.items()},
        "all": tuple(PAPER_TABLES.values()),
        "text": TEXT_TABLES,
    }
    for name in names:
        if name not in groups:
            raise BadInput(f"the paper has no table {name}; use a number from 1 to 13, all or text")
    return list(dict.fromkeys(table for name in names for table in groups[name]))


def paper_text(
    names: list[str],
    tables: "list[PaperTable]",
    only: Sequence[str],
    source: RunSource,
    form: str,
) -> tuple[str, list[str]]:
    """Return the tables in a format, after what is missing is computed, and what failed.

    `only` restricts them to the rows of some nets.
    """
    from demur.cli.progress import on_message
    from demur.paper.cells import STORED_SCALES, measure_cells, needs
    from demur.paper.published import rows_of

    command = f"demur table {' '.join(names)}"
    source.check(command)
    if only:
        tables, command = rows_of(tables, only), f"{command} --only {','.join(only)}"
    filled = set()
    if source.missing_from is not None:
        folder, scales = Path(source.missing_from), {*STORED_SCALES, *source.scales}
        stored = measure_cells(tables, folder, source.open_run, on_message, list(scales))
        filled = {cell.place for cell in stored if cell.measured is not None}
        if len(filled) == len(stored):
            raise BadInput(f"{folder} fills every cell of these tables; read it with --kept")
    failures = source.compute(needs(tables, source.scale, filled) if source.scale else (), True)
    cells = measure_cells(tables, source.folder, source.open_run, on_message, source.scales)
    text = _formatted(cells, f"{command} {source.options}", source, form, names)
    return text, [f"{len(failures)} nets could not be computed; {one}" for one in failures]


def _formatted(
    cells: "list[Cell]", command: str, source: RunSource, form: str, names: list[str]
) -> str:
    from demur.paper.results_page import latex_page, results_page

    if form == "json":
        return json.dumps([cell.to_json() for cell in cells], indent=2)
    if form == "latex":
        return latex_page(cells, command)
    if names != ["all"] or "--only" in command:
        return results_page(cells, command)
    conclusions = source.folder / "conclusions.md"
    text = conclusions.read_text(encoding="utf-8") if conclusions.is_file() else ""
    return results_page(cells, command, text, _verdict_section(source))


def verdict_text(source: RunSource, form: str) -> str:
    """Return the verdicts on R-Con of the stored runs as Markdown or JSON."""
    if source.kept is None:
        raise BadInput(
            "verdicts are made from stored runs; name their folder: demur table verdicts --kept "
            "results"
        )
    source.check("demur table verdicts")
    if form == "latex":
        raise BadInput("verdicts have no LaTeX form; leave out --latex")
    if form == "json":
        return json.dumps([one.to_json() for one in _verdicts(source)], indent=2)
    return _verdict_section(source)


def _verdict_section(source: RunSource) -> str:
    from demur.paper.results_page import verdict_section

    return verdict_section(_verdicts(source), source.folder.as_posix())


def _verdicts(source: RunSource) -> "list[Verdict]":
    from demur.cli.progress import on_message
    from demur.paper.cells import StoredRuns
    from demur.paper.verdicts import measure_verdicts

    stored = StoredRuns(source.folder, source.open_run, on_message)
    return measure_verdicts(stored, source.folder, source.scales)


@app.command()
def figure(
    names: Names,
    scale: Scale = None,
    kept: Kept = None,
    runs: Runs = RUNS_FOLDER,
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

    Example: demur figure tau reliability --kept results -o figures
    """
    from demur.cli.progress import on_message
    from demur.paper.cells import StoredRuns
    from demur.paper.figures import MissingRecord, draw_figure, figure_needs, figures_by_name

    chosen, kinds = figures_by_name(names), _formats(formats)
    source = RunSource(scale, kept, runs, device, data, engine)
    source.check(f"demur figure {' '.join(names)}")
    _check_matplotlib()
    failures = source.compute(figure_needs(chosen, scale) if scale else (), False)
    stored = None
    if any(one.evidence for one in chosen):
        stored = StoredRuns(source.folder, source.open_run, on_message)
    missing = 0
    for one in chosen:
        try:
            drawn = draw_figure(one, stored, source.scales, kinds)
        except MissingRecord as reason:
            missing += 1
            typer.echo(f"demur: figure {one.name} is not drawn: {reason}", err=True)
            continue
        _write_figure(Path(out), one.name, f"Figure {one.number}. {drawn.caption}", drawn.files)
    for failure in failures:
        typer.echo(f"demur: {failure}", err=True)
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


def _check_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise BadInput("figures need matplotlib; install it with pip install 'demur[report]'")


def _write_figure(folder: Path, name: str, caption: str, files: dict[str, bytes]) -> None:
    """Write the files of a figure and its caption, and print them."""
    from demur.files.atomic import write_bytes, write_text

    for kind, content in files.items():
        write_bytes(folder / f"{name}.{kind}", content)
    write_text(folder / f"{name}.txt", caption + "\n")
    typer.echo(f"{folder / name} ({', '.join(files)}): {caption}")


def reading_factories(folder: str, device: str, data: str | None) -> "Factories":
    """Return factories that only read the stored runs of a folder."""
    from demur.cli.evaluate import load_run
    from demur.cli.progress import on_message
    from demur.paper.measure import stored_factories

    return stored_factories(
        Path(folder), lambda run: load_run(str(run.path), device, data), on_message
    )


def training_factories(
    device: str, data: str | None, engine: str, archive: str | None
) -> "Factories":
    """Return factories that train and attack with progress bars, and archive if asked to."""
    from demur.attacks import Attack
    from demur.cli.evaluate import attack_and_report, load_run
    from demur.cli.train import train_run
    from demur.evaluate import ArchiveKeepsLess, LoadedRun, RecordOptions
    from demur.evaluate import archive as archive_run
    from demur.paper.measure import Factories
    from demur.runs import Record
    from demur.runs.record import record_path

    def keep(loaded: LoadedRun, scores: Sequence[str]) -> None:
        if archive:
            archive_run(loaded, Path(archive) / loaded.run.name, scores, again=True)

    def craft(loaded: LoadedRun, label: str, attack: Attack, options: RecordOptions) -> Record:
        record = attack_and_report(loaded, label, attack, options)
        head_score, _ = loaded.run.recipe.head_rejector
        copies = Path(archive or "") / loaded.run.name / "records"
        if archive and not record_path(copies, record.label, options.split, record.digest).exists():
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
