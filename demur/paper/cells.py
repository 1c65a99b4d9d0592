"""Every cell of the paper's tables, measured on stored runs or missing.

    cells = measure_cells(PAPER_TABLES.values(), Path("results"), open_run, print)
    cells[0].to_json()      # table, row, column, published, measured, n, restarts, protocol, record

A cell is filled from a run of the paper's schedule (110 epochs, checkpoint by PGD-10 on test) or,
if there is none, of the short one (36 epochs). `Cell.protocol` says which it was.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from demur import metrics
from demur.attacks import CW, Attack
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RejectorEvaluation, tcon_of, values
from demur.evaluate.record_scores import can_score
from demur.metrics import FloatArray
from demur.paper.published import HEAD, ORACLE, Column, PaperRow, PaperTable
from demur.paper.tables import COMPARED_CHANGES
from demur.recipes import RECIPES, Recipe, attack, with_changes
from demur.rejectors import Rejector, paper_grid
from demur.runs import Record, Run
from demur.spec import digest

SCALES = ("paper", "short")
Open = Callable[[Run], LoadedRun]


@dataclass(frozen=True)
class Cell:
    """One number of the paper beside ours."""

    table: int
    row: str
    column: str
    published: float
    measured: float | None = None
    n: int | None = None
    restarts: int | None = None
    protocol: str = ""  # epochs, checkpoint and seed of the net
    attack: str = ""
    record: str = ""  # path

    def to_json(self) -> dict[str, Any]:
        """The cell as JSON values."""
        return asdict(self)


def cell_recipe(table: PaperTable, row: PaperRow, column: Column, scale: str) -> Recipe | None:
    """The recipe of the net that a cell belongs to, or None if this scale has none."""
    changes = [*table.changes, *column.changes, *row.changes]
    name = f"cifar10-{row.entry}" + ("-short" if scale == "short" else "")
    base = RECIPES[name]
    if scale == "short":
        usual = ["data.split=paper", *COMPARED_CHANGES]
    else:
        usual = ["data.split=paper", "selection=test"]
        if hasattr(base.method.framework, "bn") and row.entry.startswith("pgdat"):
            usual.append("bn=batch")
    if any(change.startswith("data=") for change in changes):
        usual.remove("data.split=paper")
        changes = [change.replace("CIFAR100()", 'CIFAR100(split="paper")') for change in changes]
    try:
        return with_changes(base, [*usual, *changes])
    except BadInput:
        return None


def measure_cells(
    tables: Iterable[PaperTable],
    folder: Path,
    open_run: Open,
    on_message: Callable[[str], None],
    scales: Sequence[str] = SCALES,
) -> list[Cell]:
    """Every cell of the tables; `measured` is None where the folder has no record for it."""
    stored = StoredRuns(folder, open_run, on_message)
    cells = []
    for table in tables:
        for row, column, value in table.cells():
            empty = Cell(table.number, row.label, column.label, value)
            cells.append(_measure(table, row, column, empty, stored, scales))
    return cells


def _measure(
    table: PaperTable,
    row: PaperRow,
    column: Column,
    empty: Cell,
    stored: "StoredRuns",
    scales: Sequence[str],
) -> Cell:
    for scale in scales:
        recipe = cell_recipe(table, row, column, scale)
        run = stored.find(recipe) if recipe else None
        if recipe is None or run is None:
            continue
        for text in row.attacks or column.attacks:
            spec = attack(text, recipe)
            if isinstance(spec, CW):  # distances are not read from records yet
                continue
            record = stored.record(run, spec)
            value = None if record is None else stored.value(run, recipe, record, row, column)
            if record is not None and value is not None:
                return replace(
                    empty, measured=value, n=len(record.y),
                    restarts=getattr(spec, "restarts", None), protocol=protocol_of(recipe),
                    attack=text, record=str(record_file(run, record)),
                )  # fmt: skip
    return empty


def protocol_of(recipe: Recipe) -> str:
    """Epochs, checkpoint and seed, in words."""
    selected = {"test": "best PGD-10 on test", "last": "last epoch", None: "last epoch"}
    averaged = ", averaged weights" if recipe.ema else ""
    return f"{recipe.epochs} epochs{averaged}, {selected[recipe.selection]}, seed {recipe.seed}"


def record_file(run: Run, record: Record) -> Path:
    """The file of a record."""
    (path,) = (run.path / "records").glob(f"*-{record.digest[:12]}.npz")
    return path


class StoredRuns:
    """The runs under a folder by their recipes, scored once each."""

    def __init__(self, folder: Path, open_run: Open, on_message: Callable[[str], None]) -> None:
        if not folder.is_dir():
            raise BadInput(
                f"there is no folder {folder}; name one that contains runs, such as results"
            )
        self.open_run = open_run
        self.runs: dict[str, Run] = {}
        for path in sorted(folder.rglob("recipe.txt")):
            try:
                run = Run(path.parent)
                self.runs.setdefault(digest(run.recipe), run)
            except BadInput as reason:
                on_message(f"{path.parent} is skipped: {reason}")
        if not self.runs:
            raise BadInput(f"{folder} holds no run; name a folder of runs, such as results")
        self._records = cache(self._read_records)
        self._evaluation = cache(self._evaluate)

    def find(self, recipe: Recipe) -> Run | None:
        """The run of a recipe."""
        return self.runs.get(digest(recipe))

    def record(self, run: Run, spec: Attack) -> Record | None:
        """The record of an attack on the most test images."""
        matches = self._records(run.path).get(digest(spec), ())
        return max(matches, key=lambda record: len(record.y), default=None)

    def _read_records(self, path: Path) -> Mapping[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for record in Run(path).records("test"):
            found.setdefault(record.metadata["attack"], []).append(record)
        return found

    def value(
        self, run: Run, recipe: Recipe, record: Record, row: PaperRow, column: Column
    ) -> float | None:
        """The metric of a cell on a record, in percent except for AUROC; None without its score."""
        correct = record.correct
        if column.metric == "accuracy":
            return 100 * float(correct.mean())
        name = column.rejector or row.rejector
        score = self._score(run, recipe.head_rejector[0] if name == HEAD else name, record)
        if score is None:
            return None
        if column.metric == "auroc":
            return metrics.auroc(score, correct)
        return 100 * metrics.paper_stats(score, correct, 0.95).accuracy

    def _score(self, run: Run, name: str, record: Record) -> FloatArray | None:
        if name == ORACLE:
            return tcon_of(record)
        evaluation = self._evaluation(run.path)
        if name not in evaluation.scores:
            return None
        score = evaluation.score_for(name, record)
        return values(score, record) if can_score(score, record) else None

    def _evaluate(self, path: Path) -> RejectorEvaluation:
        run, records = Run(path), [one for group in self._records(path).values() for one in group]
        rejectors: dict[str, Rejector] = run.recipe.rejectors() | paper_grid(run.recipe.data)
        return RejectorEvaluation.of(self.open_run(run), rejectors=rejectors, records=records)
