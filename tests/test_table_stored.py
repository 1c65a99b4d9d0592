"""Tables made on one machine and read on another: copies that are archive, partial or damaged."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from demur import evaluate
from demur.cli import evaluate as evaluating
from demur.evaluate import Evaluator, archive
from demur.paper.tables import TABLES
from demur.runs import Run
from tests.conftest import TINIEST, Command
from tests.test_cli import refused


@pytest.mark.usefixtures("quick_table")
def test_being_stopped_costs_the_copy_no_more_than_one_attack(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["methods-digits", *TINIEST, "--only", "pgdat-rr", "--archive", "kept"]
    whole = evaluating.record_of

    def stopped(evaluator: Any, label: str, *rest: Any) -> object:
        if label == "pgd-10:steps=1":
            raise KeyboardInterrupt
        return whole(evaluator, label, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(evaluating, "record_of", stopped)
        assert command("table", *words)[0] == 130
    code, page, err = command("table", *words[:-2], "--kept", "kept")
    assert code == 0, err
    assert "| pgdat-rr | R-Con |" in page, "the score that the net was trained for is in the copy"
    assert "- pgdat-rr, seed 0: not measured yet: pgd-10:steps=1\n" in page
    assert command("table", *words)[0] == 0
    assert "Not there" not in command("table", *words[:-2], "--kept", "kept")[1]


@pytest.mark.usefixtures("quick_table")
def test_a_copy_that_keeps_more_is_not_replaced_on_the_way(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = replace(TABLES["methods-digits"], learned=("GDA",))
    monkeypatch.setitem(TABLES, "methods-digits", learned)
    words = ["methods-digits", *TINIEST, "--only", "pgdat-rr"]
    assert command("table", *words, "--archive", "kept")[0] == 0
    (clean,) = Path("kept").glob("*/records/clean-test-*.json")
    before = clean.read_text(encoding="utf-8")
    assert "GDA" in before
    lost = list(Path("kept").glob("*/records/pgd-20-test-*"))
    for path in lost:
        path.unlink()
    code, _, err = command("table", *words, "--archive", "kept")
    assert code == 0, err
    assert clean.read_text(encoding="utf-8") == before
    assert all(path.exists() for path in lost)


@pytest.mark.usefixtures("quick_table")
def test_a_copy_that_has_everything_is_made_once_and_not_after_each_attack(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["methods-digits", *TINIEST, "--only", "pgdat-rr", "--archive", "kept"]
    made: list[str] = []

    def counted(evaluator: Evaluator, target: Path, *rest: Any, **more: Any) -> Run:
        made.append(target.name)
        return archive(evaluator, target, *rest, **more)

    monkeypatch.setattr(evaluate, "archive", counted)
    assert command("table", *words)[0] == 0
    assert len(made) == 4, "after each of three attacks and at the end"
    assert command("table", *words)[0] == 0
    assert len(made) == 5


@pytest.mark.usefixtures("quick_table")
def test_a_score_that_no_record_keeps_is_named(command: Command, in_empty_folder: Path) -> None:
    words = ["methods-digits", *TINIEST, "--only", "pgdat-rr"]
    assert command("table", *words)[0] == 0
    (run,) = Path("runs").iterdir()
    assert command("archive", str(run), "-o", "kept/rr", "--only", "Con")[0] == 0
    code, page, err = command("table", *words, "--kept", "kept")
    assert code == 0, err
    assert "| pgdat-rr | Con |" in page
    assert "| R-Con |" not in page
    assert "- pgdat-rr, seed 0: without R-Con: " in page
    (rich,) = (run / "records").glob("pgd-20-test-*.npz")
    for end in (".npz", ".json"):
        there = next(Path("kept/rr/records").glob(f"pgd-20-test-*{end}"))
        there.write_bytes(rich.with_suffix(end).read_bytes())
    code, page, err = command("table", *words, "--kept", "kept")
    assert code == 0, err
    assert "- pgdat-rr, seed 0: without R-Con under clean, pgd-10:steps=1\n" in page


@pytest.mark.usefixtures("quick_table")
def test_what_was_kept_is_read_and_what_was_not_is_named(
    command: Command, in_empty_folder: Path
) -> None:
    words = ["methods-digits", *TINIEST, "--only"]
    code, out, err = command("table", *words, "pgdat-rr", "--json")
    assert code == 0, err
    (trained,) = json.loads(out)
    run = in_empty_folder / "runs" / trained["run"]
    for path in (run / "records").glob("pgd-20-*"):
        path.unlink()
    assert command("archive", str(run), "-o", "kept/rr")[0] == 0
    words += ["pgdat,pgdat-rr"]
    before = {path: path.stat().st_mtime_ns for path in in_empty_folder.rglob("*")}
    code, page, err = command("table", *words, "--seeds", "2", "--kept", "kept")
    assert code == 0, err
    assert before == {path: path.stat().st_mtime_ns for path in in_empty_folder.rglob("*")}
    assert "- pgdat, seeds 0, 1: not measured yet\n" in page
    assert "- pgdat-rr, seed 0: not measured yet: pgd-20\n" in page
    assert "## pgd-20\n\nNot measured yet." in page
    assert "| pgdat-rr (1 of 2 seeds) | R-Con |" in page
    assert "| pgdat-rr | 0 | rr |" in page
    code, page, err = command("table", *words, "--first-seed", "3", "--kept", "kept")
    assert (code, page) == (2, "")
    assert "kept holds no record of what methods-digits asks for" in err
    lines = json.loads(command("table", *words, "--kept", "kept", "--json")[1])
    assert lines[1]["rows"] == [row for row in trained["rows"] if row["attack"] != "pgd-20"]
    (arrays,) = Path("kept/rr/records").glob("clean-test-*.npz")
    away = arrays.rename("away")
    code, page, err = command("table", *words, "--kept", "kept")
    assert (code, page) == (2, ""), "no figure comes from it"
    assert f"{arrays} is missing, though {arrays.stem}.json is there" in err
    away.rename(arrays)
    assert command("archive", str(run), "-o", "kept/again", "--only", "R-Con")[0] == 0
    refused(
        command("table", *words, "--kept", "kept"), "again and rr in kept are runs of one recipe"
    )


def test_a_folder_with_nothing_of_the_table_is_refused_and_the_page_left_alone(
    command: Command, tiny_run: Run, in_empty_folder: Path
) -> None:
    copytree(tiny_run.path, in_empty_folder / "kept" / "tiny")
    Path("page.md").write_text("old", encoding="utf-8")
    code, out, err = command("table", "methods-digits", "--kept", "kept", "-o", "page.md")
    assert (code, out) == (2, "")
    assert err == (
        "demur: kept holds no record of what methods-digits asks for; name another folder\n"
    )
    assert Path("page.md").read_text(encoding="utf-8") == "old"


def test_a_study_on_cal_images_with_a_retrofitted_line(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(TABLES["study-digits"], attacks=("clean", "pgd-10:steps=1"), split="cal")
    monkeypatch.setitem(TABLES, "study-digits", study)
    words = ["study-digits", *TINIEST, "--only", "retrofit"]
    code, made, err = command("table", *words, "--archive", "kept")
    assert code == 0, err
    assert " cal images\n" in made
    assert "held out" in made
    assert "| retrofit | R-Con |" in made
    assert "frozen: coverage" not in made, "the threshold would come from the same images"
    runs = sorted(run.name for run in Path("runs").iterdir())
    assert sorted(copy.name for copy in Path("kept").iterdir()) == runs
    code, again, err = command("table", *words, "--kept", "kept")
    assert code == 0, err
    figures = [line for line in made.splitlines() if line.startswith("|")]
    assert [line for line in again.splitlines() if line.startswith("|")] == figures


@pytest.mark.usefixtures("quick_table")
def test_a_damaged_copy_costs_its_own_line_and_no_other(
    command: Command, in_empty_folder: Path
) -> None:
    words = ["methods-digits", *TINIEST, "--only", "pgdat,pgdat-rr"]
    code, _, err = command("table", *words, "--archive", "kept")
    assert code == 0, err
    (arrays,) = Path("kept").glob("pgdat-rr-*/records/clean-test-*.npz")
    arrays.unlink()
    broken = Path("kept/broken/recipe.txt")
    broken.parent.mkdir()
    broken.write_text("Recipe(", encoding="utf-8")
    reason = f"pgdat-rr, seed 0: {arrays} is missing, though {arrays.stem}.json is there"
    code, page, err = command("table", *words, "--kept", "kept", "-o", "page.md")
    assert code == 2
    assert f"broken is passed over: {broken} cannot be read" in err
    assert f"demur: 1 of 2 lines could not be made; {reason}" in err
    assert f"- {reason}" in page
    assert "| pgdat | Con |" in page
    assert Path("page.md").read_text(encoding="utf-8") == page.removesuffix("\n")
