"""What a cell of the paper's tables holds: each is measured on stored runs, or missing.

    cells = measure_cells(PAPER_TABLES.values(), Path("results"), open_run, print)
    cells[0].to_json()      # table, row, column, published, measured, n, restarts, protocol, record

A cell is filled from a run of the paper's schedule (110 epochs, checkpoint by PGD-10 on test) or,
if there is none, of a shorter one (36 or 20 epochs). `Cell.protocol` says which it was. `needs`
lists the attacks that fill a table.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from demur import metrics
from demur.attacks import CW, Misclassified
from demur.errors import BadInput
from demur.evaluate import RecordOptions, RejectorEvaluation, tcon_of, values
from demur.evaluate.record_scores import can_score
from demur.metrics import FloatArray
from demur.paper.paper_runs import RUNS_IN_MEMORY, Need, Open, StoredRuns, accuracy_by_severity
from demur.paper.published import HEAD, ORACLE, Column, Metric, PaperRow, PaperTable
from demur.paper.scales import SCALES, settings_grid
from demur.paper.studies import distances_of, paper_mean_distance
from demur.recipes import VOCABULARY, Recipe, attack
from demur.rejectors import REFERENCE_RIDGE_NAME, Rejector
from demur.rejectors.rule import Score
from demur.runs import Record, Run
from demur.spec import digest, read

STORED_SCALES = ("paper", "short", "brief")  # by preference
MEGABYTE = 1_000_000
STRONG = {  # first success of several restarts instead of the last iterate
    "multi-target": "multi-target:keep=success",
    "gama-pgd:restarts=1,keep=max_objective": "gama-pgd",
    "gama-fw:restarts=1,keep=max_objective": "gama-fw",
}
TEN_STEPS = {  # the same threat with ten steps
    "pgd-100:restarts=10": ("pgd-10:restarts=10", "pgd-10"),
    "pgd-100:restarts=10,eps=16/255": ("pgd-10:eps=16/255,restarts=10", "pgd-10:eps=16/255"),
    "pgd-100-l2:restarts=10": ("pgd-10-l2:restarts=10", "pgd-10-l2"),
}
PLAIN_PGD = ("pgd-100:restarts=10", "pgd-100")  # what the paper's code runs as GAMA-PGD
Place = tuple[int | str, str, str]  # table, row and column of a cell


@dataclass(frozen=True)
class Cell:
    """One number of the paper beside ours."""

    table: int | str  # its number, or the name of results in the text
    row: str
    column: str
    published: float
    measured: float | None = None
    last: float | None = None  # at the last epoch, if an earlier one was selected
    n: int | None = None
    restarts: int | None = None
    protocol: str = ""  # epochs, checkpoint and seed of the net
    attack: str = ""
    record: str = ""  # path
    variants: dict[str, float] = field(default_factory=dict)  # measured in other ways, by name

    @property
    def place(self) -> Place:
        """Table, row and column."""
        return self.table, self.row, self.column

    def to_json(self) -> dict[str, Any]:
        """The cell as JSON values; a number without a definition is the text `undefined`."""
        fields = asdict(self)
        undefined = self.measured is not None and math.isnan(self.measured)
        return fields | {"measured": "undefined"} if undefined else fields


def cell_recipe(table: PaperTable, row: PaperRow, column: Column, scale: str) -> Recipe | None:
    """The recipe of the net that a cell belongs to, or None if this scale has none."""
    return _recipe(scale, row.entry, tuple(cell_changes(table, row, column)))


@cache
def _recipe(scale: str, entry: str, changes: tuple[str, ...]) -> Recipe | None:
    return SCALES[scale].recipe(entry, changes)


def cell_changes(table: PaperTable, row: PaperRow, column: Column) -> list[str]:
    """The changes of the recipe of a cell's net."""
    return [*table.changes, *column.changes, *row.changes]


def needs(
    tables: Iterable[PaperTable], scale: str, filled: Collection[Place] = ()
) -> Iterator[Need]:
    """Every attack that fills a cell of the tables at a scale; several cells may share one.

    Cells at the places of `filled` need nothing.
    """
    at = SCALES[scale]
    for table in tables:
        for row, column, _ in table.cells():
            if (table.number, row.label, column.label) in filled:
                continue
            recipe = cell_recipe(table, row, column, scale)
            texts = at.choose(row.attacks or column.attacks)
            if scale == "paper":  # the strong attacks too
                others = (
                    text for _, other in cell_variants(row, column) for text in other.attacks[:1]
                )
                texts = tuple(dict.fromkeys((*texts, *others)))
            for text in texts if recipe else ():
                assert recipe is not None
                name = _rejector(row, column, recipe)
                fitted = name != ORACLE and not isinstance(recipe.rejectors().get(name), Score)
                options = RecordOptions("test", at.images(text), None, 0, fitted)
                yield Need(f"{scale}-{row.entry}", recipe, at.attack_text(text, recipe), options)


def cell_variants(row: PaperRow, column: Column) -> Iterator[tuple[str, Column]]:
    """Other ways to measure a cell, where the paper's code and text differ: name and column."""
    first = next(iter(column.attacks), "")
    if first in STRONG:
        yield "strong attack, first success", column._replace(attacks=(STRONG[first],))
    for restarts, text in zip((10, 1), TEN_STEPS.get(first, ()), strict=False):
        name = f"ten steps, {restarts} restart{'s' if restarts > 1 else ''}"
        yield name, column._replace(attacks=(text,))
    if first.startswith("gama-pgd"):
        yield "plain PGD with 100 steps", column._replace(attacks=PLAIN_PGD)
    if first.startswith("corruption:"):
        yield "a threshold for each severity", column._replace(metric="tpr95_by_severity")
    if column.metric == "distance":
        yield "mean of the broken", column._replace(metric="distance_of_broken")
        yield "broken by a change, %", column._replace(metric="broken")
    if row.entry == "pgdat-carl" and column.metric == "auroc":
        yield "score of the paper's code, one minus ours", column._replace(metric="auroc_reversed")
    if row.rejector in ("GDA", "GDA*", "GMM"):
        name = REFERENCE_RIDGE_NAME.format(row.rejector)
        yield "ridge of the paper's code, 1e-10", column._replace(rejector=name)


def measure_cells(
    tables: Iterable[PaperTable],
    folder: Path,
    open_run: Open,
    on_message: Callable[[str], None],
    scales: Sequence[str] = STORED_SCALES,
) -> list[Cell]:
    """Every cell of the tables; `measured` is None where the folder has no record for it."""
    places = [(table, *cell) for table in tables for cell in table.cells()]
    stored = ScoredRuns(folder, open_run, on_message, _rejectors_by_net(places, scales))
    # by net, since only the records of a few runs fit into memory
    order = sorted(range(len(places)), key=lambda i: _net_of(*places[i][:3]))
    cells = {i: _measure_at_first(*places[i], stored, scales) for i in order}
    return [cells[i] for i in range(len(places))]


def _net_of(table: PaperTable, row: PaperRow, column: Column) -> tuple[str, list[str]]:
    return row.entry, cell_changes(table, row, column)


def _measure_at_first(
    table: PaperTable,
    row: PaperRow,
    column: Column,
    value: float,
    stored: "ScoredRuns",
    scales: Sequence[str],
) -> Cell:
    """The cell at the first scale that has a record for it."""
    empty = Cell(table.number, row.label, column.label, value)
    for scale in scales:
        recipe = cell_recipe(table, row, column, scale)
        if recipe is None:
            continue
        cell = _measure(recipe, row, column, empty, stored, scale)
        if cell.measured is not None:
            of_last = replace(recipe, selection="last")
            last = _measure(of_last, row, column, empty, stored, scale)
            compared = of_last != recipe and cell.n is not None and last.attack == cell.attack
            stand_ins = SCALES[scale].stand_ins(cell_changes(table, row, column))
            protocol = f"{stand_ins}, {cell.protocol}" if stand_ins else cell.protocol
            others = {
                label: _measure(recipe, row._replace(attacks=()), other, empty, stored, scale)
                for label, other in cell_variants(row, column)
            }
            return replace(
                cell, last=last.measured if compared else None, protocol=protocol,
                variants={k: v.measured for k, v in others.items() if v.measured is not None},
            )  # fmt: skip
    return empty


def _measure(
    recipe: Recipe, row: PaperRow, column: Column, empty: Cell, stored: "ScoredRuns", scale: str
) -> Cell:
    """The cell on the first run of a recipe that has a record; `empty` if there is none."""
    runs = stored.find(recipe)
    if column.metric in ("megabytes", "epoch_seconds"):
        return _training_cost(recipe, column.metric, empty, runs)
    for text, run in product(row.attacks or column.attacks, runs):
        label = SCALES[scale].attack_text(text, recipe)
        spec = attack(label, recipe)
        record = stored.record(run, spec)
        value = None if record is None else stored.value(run, recipe, record, row, column)
        if record is not None and value is not None:
            images = record.metadata.get("source")  # of a corruption
            source = f", {images} images" if images else ""
            return replace(
                empty, measured=value, n=len(record.y),
                restarts=getattr(spec, "restarts", None), protocol=protocol_of(recipe) + source,
                attack=label, record=str(record_file(run, record)),
            )  # fmt: skip
    return empty


def _training_cost(recipe: Recipe, metric: Metric, empty: Cell, runs: Sequence[Run]) -> Cell:
    """The cell of a cost: of the recipe's net, or of the first run with a log."""
    if metric == "megabytes":
        return replace(empty, measured=megabytes(recipe), protocol="parameters and buffers")
    for run in runs:
        seconds = epoch_seconds(run)
        if seconds is not None:
            device = run.checkpoint.get("device", "unknown device")
            how = f"{protocol_of(recipe)}, median of the epochs, {device}"
            return replace(empty, measured=seconds, protocol=how, record=str(metrics_file(run)))
    return empty


def _rejector(row: PaperRow, column: Column, recipe: Recipe) -> str:
    """The name of the rejector of a cell, in tables of a run."""
    name = column.rejector or row.rejector
    return recipe.head_rejector[0] if name == HEAD else name


def _rejectors_by_net(
    places: Iterable[tuple[PaperTable, PaperRow, Column, float]], scales: Sequence[str]
) -> dict[str, set[str]]:
    """The rejectors of every cell by the key of its net."""
    names: dict[str, set[str]] = {}
    for table, row, column, _ in places:
        for scale in scales:
            recipe = cell_recipe(table, row, column, scale)
            if recipe is not None:
                own = names.setdefault(_net_key(recipe), {"Con"})
                columns = column, *(other for _, other in cell_variants(row, column))
                own |= {_rejector(row, one, recipe) for one in columns}
    return names


@cache
def _net_key(recipe: Recipe) -> str:
    """The same for the selected epoch and the last one."""
    return digest(replace(recipe, selection=None))


def protocol_of(recipe: Recipe) -> str:
    """Epochs, checkpoint and seed, in words."""
    selected = {"test": "best PGD-10 on test", "last": "last epoch", None: "last epoch"}
    averaged = ", averaged weights" if recipe.ema else ""
    return f"{recipe.epochs} epochs{averaged}, {selected[recipe.selection]}, seed {recipe.seed}"


def record_file(run: Run, record: Record) -> Path:
    """The file of a record."""
    (path,) = (run.path / "records").glob(f"*-{record.digest[:12]}.npz")
    return path


def _metric(metric: Metric, score: FloatArray, record: Record) -> float:
    """A metric of a score on a record, in percent except for AUROC; NaN if it has no definition."""
    if metric.startswith("auroc") and record.correct.all() == record.correct.any():
        return math.nan
    match metric:
        case "auroc":
            return metrics.auroc(score, record.correct)
        case "auroc_reversed":
            return metrics.auroc(-score, record.correct)
        case "tpr95_by_severity":
            return 100 * accuracy_by_severity(score, record, 0.95)
    return 100 * metrics.paper_stats(score, record.correct, 0.95).accuracy


class ScoredRuns(StoredRuns):
    """The index of runs with the rejectors of each net, fitted once."""

    def __init__(
        self,
        folder: Path,
        open_run: Open,
        on_message: Callable[[str], None],
        rejectors: Mapping[str, set[str]],  # names by the key of a net
    ) -> None:
        super().__init__(folder, open_run, on_message)
        self.rejectors = rejectors
        self._evaluation = lru_cache(RUNS_IN_MEMORY)(self._evaluate)

    def value(
        self, run: Run, recipe: Recipe, record: Record, row: PaperRow, column: Column
    ) -> float | None:
        """The metric of a cell on a record, in percent except for AUROC; None without its score."""
        if column.metric == "accuracy":
            return 100 * float(record.correct.mean())
        if column.metric in ("distance", "distance_of_broken", "broken"):
            return self._distance(run, record, column.metric)
        name = _rejector(row, column, recipe)
        if name == ORACLE and not record.correct.any():
            return math.nan  # it accepts none
        score = self._score(run, name, record)
        return None if score is None else _metric(column.metric, score, record)

    def _distance(self, run: Run, record: Record, metric: str) -> float | None:
        """A metric of a record of C&W; None without a record of the normal attack."""
        spec = read(str(record.metadata["spec"]), VOCABULARY)
        if not isinstance(spec, CW):
            return None
        distance = distances_of(record, spec)
        moved = distance > 0
        if metric == "broken":
            return 100 * float(moved.mean())
        if metric == "distance_of_broken":
            return float(distance[moved].mean()) if moved.any() else None
        normal = self.record(run, replace(spec, criterion=Misclassified()))
        return None if normal is None else paper_mean_distance(record, normal, spec)

    def _score(self, run: Run, name: str, record: Record) -> FloatArray | None:
        if name == ORACLE:
            return tcon_of(record)
        evaluation = self._evaluation(run.path)
        if name not in evaluation.scores:
            return None
        score = evaluation.score_for(name, record)
        return values(score, record) if can_score(score, record) else None

    def _evaluate(self, path: Path) -> RejectorEvaluation:
        run, groups = Run(path), self.records(path, "test").values()
        known: dict[str, Rejector] = run.recipe.rejectors() | settings_grid(run.recipe)
        wanted = self.rejectors[_net_key(run.recipe)]
        rejectors = {name: one for name, one in known.items() if name in wanted}
        records = [one for group in groups for one in group]
        return RejectorEvaluation.of(self.open_run(run), rejectors=rejectors, records=records)


def metrics_file(run: Run) -> Path:
    """The log of a training, one line per epoch."""
    return run.path / "metrics.jsonl"


def epoch_seconds(run: Run) -> float | None:
    """Median seconds per epoch, with validation if the recipe validates; None without a log.

    The first epoch compiles the training step, so it is no part of a mean.

    Raises:
        BadInput: The log was changed, or a line has no seconds.
    """
    if run.metrics_state == "missing":  # raises if the file was changed
        return None
    path = metrics_file(run)
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return float(median(float(line["seconds"]) for line in lines))
    except (ValueError, KeyError, TypeError):  # ValueError: no JSON, or no line
        raise BadInput(f"{path} has no seconds of each epoch; restore it, or delete it") from None


@cache
def megabytes(recipe: Recipe) -> float:
    """Size of the state of the net that a recipe trains, in millions of bytes."""
    with torch.device("meta"):
        net = recipe.net.build(recipe.data.domain, recipe.method.head)
    sizes: list[int] = [one.numel() * one.element_size() for one in net.state_dict().values()]
    return sum(sizes) / MEGABYTE
