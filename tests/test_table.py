"""Tables: averages over seeds, failed trainings, and the command."""

import json
from pathlib import Path

import pytest

from demur.errors import Diverged
from demur.evaluate.paired_differences import paired
from demur.metrics import Difference
from demur.paper.comparisons import (
    COMPARISONS,
    Comparison,
    TrainingResult,
    average_seeds,
    entry_folder,
    measure_comparison,
)
from demur.paper.pages import comparison_page
from demur.paper.paper_runs import RunSteps, StoredRuns, compute
from demur.recipes import RECIPES
from demur.runs import run_folder
from demur.spec import digest
from tests.conftest import FEW, STUDY, TINIEST, Command
from tests.test_cli import expect_error


def test_paired_differences_combine_image_and_seed_variance() -> None:
    one = Difference(0.02, -0.01, 0.05, 0.2)
    assert paired([one]) == one
    same = paired([one, one, one])
    assert (same.value, same.lo, same.hi) == pytest.approx((0.02, -0.01, 0.05))
    apart = paired([one, Difference(0.06, 0.03, 0.09, 0.0)])
    assert apart.value == pytest.approx(0.04)
    assert apart.hi - apart.lo > 0.06  # seeds that disagree widen it
    two_seeds = paired([Difference(0.02, 0.02, 0.02, 1), Difference(0.06, 0.06, 0.06, 1)])
    half = two_seeds.hi - two_seeds.value
    assert half == pytest.approx(12.706 * 0.02, rel=1e-3)  # t with 1 degree of freedom
    assert paired([Difference(0, 0, 0, 1), Difference(0, 0, 0, 1)]).p == 1


def test_a_diverged_training_is_listed_as_missing(tmp_path: Path) -> None:
    def train(recipe: object, folder: Path) -> object:
        raise Diverged("the loss is no longer a number at epoch 1, step 3 of 9")

    table = Comparison("A table", {"ebd": RECIPES["digits-pgdat-ebd"]}, ("clean",))
    steps = RunSteps(train, None, None)  # type: ignore[arg-type]
    failures = compute(table.needs((0, 1)), tmp_path, steps, print)
    stored = StoredRuns(tmp_path, steps.open, print, required=False)
    results = measure_comparison(table, (0, 1), stored, failures)
    assert [result.failure[:8] for result in results] == ["diverged", "diverged"]
    page = comparison_page(table, results, "demur x", "1.0")
    assert "- ebd, seeds 0, 1: diverged: the loss is no longer a number" in page


def test_the_table_of_methods_has_the_main_pairs() -> None:
    entries = COMPARISONS["methods-digits"].entries
    some = {"standard", "pgdat-rr", "trades-rr", "ccat-rr", "pgdat-snet", "pgdat-atro"}
    assert some <= set(entries)
    assert len({digest(recipe) for recipe in entries.values()}) == len(entries)


@pytest.mark.parametrize("name", COMPARISONS)
def test_all_entries_of_a_table_differ(name: str) -> None:
    entries = COMPARISONS[name].entries
    assert len({digest(recipe) for recipe in entries.values()}) == len(entries)
    folders = {run_folder(entry_folder(name), recipe, True) for name, recipe in entries.items()}
    assert len(folders) == len(entries)


def test_no_two_recipes_share_a_folder() -> None:
    assert len({run_folder(name, recipe, False) for name, recipe in RECIPES.items()}) == len(
        RECIPES
    )


def test_entry_names_become_folder_names() -> None:
    assert entry_folder("PGDAT, RR (tau 0.5)") == "pgdat-rr-tau-0.5"


@pytest.mark.usefixtures("quick_table")
def test_the_command_writes_the_page_and_reuses_runs(
    command: Command, in_empty_folder: Path
) -> None:
    arguments = ["methods-digits", *TINIEST, "--only", "pgdat-rr", "--seeds", "2"]
    code, out, err = command(*STUDY, *arguments, "-o", "page.md")
    assert code == 0, err
    page = (in_empty_folder / "page.md").read_text()
    assert page in out
    assert "# Training methods" in page
    assert f"## clean, {FEW} images" in page
    assert "| pgdat-rr | R-Con |" in page
    assert "--seeds 2" in page
    code, out, err = command(*STUDY, *arguments, "--json")
    assert code == 0
    assert "clean, pgdat-rr-" in err, "the existing records are read"
    assert "train, pgdat-rr-" not in err
    lines = json.loads(out)
    assert [line["seed"] for line in lines] == [0, 1]
    assert all((in_empty_folder / "runs" / line["run"]).is_dir() for line in lines)
    aurocs = [
        row["ranking"]["auroc"]
        for line in lines
        for row in line["rows"]
        if (row["attack"], row["rejector"], row["protocol"]) == ("pgd-20", "R-Con", "paper")
    ]
    assert f"{sum(aurocs) / 2:.3f} ± " in page


@pytest.mark.usefixtures("quick_table")
def test_the_cifar10_table_has_the_methods_of_the_paper() -> None:
    entries = COMPARISONS["methods-cifar10"].entries
    assert {"standard", "trades-rr", "ccat-rr", "pgdat-carl", "pgdat-atro"} <= set(entries)
    assert all(recipe.data.splits == ("fit", "test") for recipe in entries.values())


def test_wrong_arguments_are_one_sentence(command: Command, in_empty_folder: Path) -> None:
    expect_error(
        command(*STUDY, "method-digits"),
        "no comparison of recipes is called 'method-digits'; did you mean methods-digits",
    )
    expect_error(command(*STUDY, "methods-digits", "seed=3"), "say how many with --seeds")
    expect_error(
        command(*STUDY, "methods-digits", "--only", "pgdat-r"), "the table has no entry 'pgdat-r'"
    )
    assert not (in_empty_folder / "runs").exists()
    expect_error(
        command(*STUDY, "methods-digits", "--from", "nowhere"),
        "there is no folder nowhere; name one that contains runs",
    )
    expect_error(command(*STUDY, "methods-digits", "--from", "."), "holds no run")
    expect_error(
        command(*STUDY, "methods-digits", "head.weight=2", "--only", " pgdat , pgdat-rr"),
        "the entry pgdat cannot be changed: no key 'weight'",
    )
    expect_error(
        command(*STUDY, "methods-digits", "--from", ".", "--archive", "copies"), "leave out one"
    )
    Path("a-file").touch()
    expect_error(
        command(*STUDY, "methods-digits", "--archive", "./runs"), "holds the runs themselves"
    )
    expect_error(command(*STUDY, "methods-digits", "--from", ""), "the folder to read is empty")
    expect_error(
        command(*STUDY, "methods-digits", "--archive", "a-file"), "a-file is a file; name a folder"
    )
    expect_error(command(*STUDY, "methods-digits", "--only", ","), "',' names nothing")


def test_results_without_rows_have_no_average() -> None:
    failed = TrainingResult("ebd", 0, "0" * 64, "ebd", failure="diverged: the loss is large")
    assert average_seeds([failed]) == []


@pytest.mark.usefixtures("quick_table")
def test_a_failing_entry_does_not_stop_the_others(command: Command, in_empty_folder: Path) -> None:
    arguments = ["methods-digits", *TINIEST, "--only", "pgdat,pgdat-rr"]
    assert command(*STUDY, *arguments[:-1], "pgdat")[0] == 0
    (run,) = (in_empty_folder / "runs").iterdir()
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for path in (run / "records").iterdir():
        path.unlink()
    code, page, err = command(*STUDY, *arguments, "-o", "page.md")
    assert code == 2
    reason = f"pgdat, seed 0: {weights.relative_to(in_empty_folder)} is damaged"
    assert f"demur: 1 of 2 lines could not be made; {reason}" in err
    assert f"- {reason}" in page
    assert "| pgdat-rr | R-Con |" in Path("page.md").read_text(encoding="utf-8")
    code, page, err = command(*STUDY, *arguments[:-1], "pgdat", "-o", "page.md")
    assert (code, page) == (2, "")
    assert err.endswith(f"demur: {err.partition('demur: ')[2]}")
    assert "| pgdat-rr | R-Con |" in Path("page.md").read_text(encoding="utf-8"), "not overwritten"
