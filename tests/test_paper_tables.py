"""The paper's tables: published numbers, cells filled from stored runs, and the page of all."""

import json
from pathlib import Path

import pytest

from demur import metrics
from demur.cli.evaluate import load_run
from demur.evaluate import values
from demur.paper.cells import Cell, cell_recipe, measure_cells
from demur.paper.published import PAPER_TABLES
from demur.paper.results_page import results_page
from demur.recipes import attack
from demur.rejectors import RCon
from demur.runs import Run
from tests.conftest import Command
from tests.test_cli import expect_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    tables = PAPER_TABLES.values()
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


def test_the_results_page_is_current(cells: list[Cell]) -> None:
    text = (RESULTS / "conclusions.md").read_text()
    page = results_page(cells, "demur table all --kept results", text)
    assert page == (ROOT / "RESULTS.md").read_text(), (
        "make it again: demur table all --kept results -o RESULTS.md"
    )


def test_one_table_as_json(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = command("table", "1", "--kept", "results", "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert len(rows) == 12
    assert {"table", "row", "column", "published", "measured", "n", "restarts", "protocol",
            "record"} <= rows[0].keys()  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["14", "--kept", "results"], "from 1 to 13"),
        (["2"], "--kept results"),
        (["2", "epochs=3", "--kept", "results"], "take no changes"),
        (["all", "--kept", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_a_wrong_request_is_one_sentence(command: Command, words: list[str], message: str) -> None:
    expect_error(command("table", *words), message)
