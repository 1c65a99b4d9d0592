"""The paper's tables: published numbers, cells filled from stored runs, and the page of all."""

import json
import re
import shutil
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path

import pytest

from demur import metrics
from demur.cli.evaluate import load_run
from demur.errors import BadInput
from demur.evaluate import values
from demur.paper.cells import Cell, ScoredRuns, _measure, cell_recipe, epoch_seconds, measure_cells
from demur.paper.figures import FIGURES, _suffices
from demur.paper.pages import disagreement_section, results_page
from demur.paper.paper_runs import StoredRuns
from demur.paper.published import PAPER_TABLES, TABLES_BY_NUMBER, Column
from demur.paper.verdicts import measure_verdicts, verdict_section
from demur.recipes import attack
from demur.rejectors import RCon
from demur.runs import Run
from tests.conftest import Command
from tests.samples import Samples
from tests.test_cli import expect_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
TABLE = ("paper", "table")


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    tables = TABLES_BY_NUMBER.values()
    return measure_cells(tables, RESULTS, lambda run: load_run(str(run.path), "cpu", None), print)


def test_every_published_number_is_there() -> None:
    """433 cells need no CIFAR-100."""
    counts = {number: len(list(table.cells())) for number, table in PAPER_TABLES.items()}
    assert counts == {1: 12, 2: 120, 3: 90, 4: 27, 5: 16, 6: 16, 7: 24, 8: 12, 9: 26, 10: 30,
                      11: 128, 12: 44, 13: 64}  # fmt: skip
    for table in PAPER_TABLES.values():
        for _, column, value in table.cells():
            assert 0 <= value <= 1 if column.metric == "auroc" else 0 <= value <= 100


def test_every_cell_has_a_recipe_and_known_attacks() -> None:
    for table in PAPER_TABLES.values():
        for row, column, _ in table.cells():
            recipe = cell_recipe(table, row, column, "paper")
            assert recipe is not None, row
            for text in row.attacks or column.attacks:
                attack(text, recipe)


def test_a_measured_cell_is_the_metric_of_its_record(cells: list[Cell]) -> None:
    wanted = ("PGD-AT, RR", "Linf 8/255, TPR-95")
    (cell,) = [one for one in cells if one.table == 2 and (one.row, one.column) == wanted]
    record_path = Path(cell.record)
    assert record_path.is_file()
    (record,) = [
        one for one in Run(record_path.parents[1]).records("test")
        if one.digest[:12] in record_path.name
    ]  # fmt: skip
    stats = metrics.paper_stats(values(RCon(), record), record.correct, 0.95)
    assert cell.measured == pytest.approx(100 * stats.accuracy)
    assert (cell.n, cell.restarts) == (10_000, 10)
    assert cell.protocol == "110 epochs, best PGD-10 on test, seed 0"
    assert cell.published == 58.21


def test_the_results_page_is_current(
    cells: list[Cell], monkeypatch: pytest.MonkeyPatch, samples: Samples
) -> None:
    """Every cell, and the verdicts on a few nets; `make exhaustive` measures those on all."""
    monkeypatch.chdir(ROOT)
    text = (RESULTS / "conclusions.md").read_text()
    stored = StoredRuns(Path("results"), lambda run: load_run(str(run.path), "cpu", None), print)
    stored.runs = dict(list(stored.runs.items())[:: max(1, len(stored.runs) // samples(5, 10**6))])
    verdicts = verdict_section(measure_verdicts(stored), "results")
    rows = [row for row in verdicts.splitlines() if row.startswith("|") and " [" in row]
    command, sections = "demur paper table all --from results", [disagreement_section(cells)]
    page = results_page(cells, command, text, sections).splitlines()
    lines = (ROOT / "RESULTS.md").read_text().splitlines()
    again = "make it again: demur paper table all --from results -o RESULTS.md"
    assert differing_lines("\n".join(page), "\n".join(lines[: len(page)])) == [], again
    found = {row for row in rows if any(_agree(row, line) for line in lines[len(page) :])}
    assert len(rows) >= 10
    assert found == set(rows), again


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def differing_lines(made: str, stored: str) -> list[tuple[str | None, str | None]]:
    """Lines that differ by more than one unit of the last digit of a number.

    An end of a bootstrap interval may be rounded otherwise on another processor.
    """
    lines = zip_longest(made.splitlines(), stored.splitlines())
    return [(one, other) for one, other in lines if not _agree(one, other)]


def _agree(one: str | None, other: str | None) -> bool:
    if one is None or other is None or NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    for first, second in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True):
        digits = len(first.partition(".")[2])
        if digits != len(second.partition(".")[2]):
            return False
        if abs(Decimal(first) - Decimal(second)) > (Decimal(10) ** -digits if digits else 0):
            return False
    return True


def test_lines_agree_up_to_one_unit_of_the_last_digit() -> None:
    text = "| PGD, 10 steps | +0.12 [-0.01, 0.250] |\n"
    assert differing_lines(text, text.replace("0.12", "0.13")) == []
    for wrong in ("0.14", "0.1", "0.120", "x"):
        assert len(differing_lines(text, text.replace("0.12", wrong))) == 1
    for other in (text.replace("10 steps", "11 steps"), text.replace("+", "-"), text + "more"):
        assert len(differing_lines(text, other)) == 1


def test_one_table_as_json(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = command(*TABLE, "1", "--from", "results", "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert len(rows) == 12
    assert {"table", "row", "column", "published", "measured", "n", "restarts", "protocol",
            "record"} <= rows[0].keys()  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["14", "--from", "results"], "use 1 to 13, all"),
        (["2"], "--from results"),
        (["2", "epochs=3", "--from", "results"], "there is no table 'epochs=3'"),
        (["all", "--from", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_a_wrong_request_is_one_sentence(command: Command, words: list[str], message: str) -> None:
    expect_error(command(*TABLE, *words), message)


def test_of_several_runs_of_a_recipe_the_first_with_the_record_fills_a_cell(tmp_path: Path) -> None:
    stored_run = RESULTS / "paper-cifar10" / "pgdat-rr-seed0-last"
    for name in ("a", "b"):
        shutil.copytree(stored_run, tmp_path / name)
    for path in (tmp_path / "a" / "records").glob("pgd-10-*"):
        path.unlink()
    stored = ScoredRuns(tmp_path, lambda run: load_run(str(run.path), "cpu", None), print, {})
    recipe = Run(stored_run).recipe
    assert [run.name for run in stored.find(recipe)] == ["a", "b"]
    row, empty = PAPER_TABLES[2].rows[-1], Cell(2, "row", "column", 0.0)
    for text, name in (("clean", "a"), ("pgd-10", "b")):
        column = Column("all", (text,), "accuracy")
        cell = _measure(recipe, row._replace(attacks=()), column, empty, stored, "paper")
        assert Path(cell.record).parents[1].name == name


def test_the_adaptive_figure_is_drawn_from_scores() -> None:
    run = Run(RESULTS / "paper-cifar10" / "pgdat-rr-seed0")
    (record,) = [one for one in run.records() if one.label == "pgd-100"]
    assert record.scores_only
    evidence = FIGURES["adaptive"].evidence[0]
    assert _suffices(record, evidence, run.recipe)
    assert not _suffices(record, FIGURES["separability"].evidence[0], run.recipe)


def test_the_cost_of_the_head_is_that_of_logs_and_nets(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = command(*TABLE, "text", "--from", "results", "--json")
    assert code == 0, err
    cells = [one for one in json.loads(out) if one["table"] == "text-head"]
    found = {(one["row"], one["column"]): one for one in cells}
    assert len(found) == 6
    log = RESULTS / "paper-cifar10" / "pgdat-rr-seed0" / "metrics.jsonl"
    seconds = sorted(json.loads(line)["seconds"] for line in log.read_text().splitlines())
    cell = found["PGD-AT, RR", "ResNet-18, s per epoch"]
    assert cell["measured"] == (seconds[54] + seconds[55]) / 2  # of 110 epochs
    assert (cell["record"], cell["published"]) == (str(log.relative_to(ROOT)), 320.0)
    # the head of the paper: 512 x 256 + 256, batch norm of 256, 256 + 1; 8 bytes count batches
    head = 4 * (512 * 256 + 256 + 4 * 256 + 256 + 1) + 8
    for net, size in (("ResNet-18", head), ("WRN-34-10", 4 * (640 * 320 + 320 * 6 + 1) + 8)):
        with_head, without = (
            found[row, f"{net}, MB"]["measured"] for row in ("PGD-AT, RR", "PGD-AT")
        )
        assert with_head - without == pytest.approx(size / 1e6)
        assert with_head == pytest.approx(found["PGD-AT, RR", f"{net}, MB"]["published"], abs=0.05)


def test_a_log_without_seconds_is_named(tmp_path: Path) -> None:
    stored_run = RESULTS / "methods-cifar10" / "pgdat-seed1"
    run = Run(Path(shutil.copytree(stored_run, tmp_path / "run")))
    assert epoch_seconds(run) == pytest.approx(6.6, abs=0.1)
    (run.path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(BadInput, match="metrics"):
        epoch_seconds(run)
    (run.path / "metrics.jsonl").unlink()
    assert epoch_seconds(run) is None
