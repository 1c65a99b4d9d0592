"""Tables from stored runs: archives, partial copies and damaged copies."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from demur import evaluate
from demur.cli import evaluate as evaluating
from demur.evaluate import LoadedRun, archive
from demur.paper.comparisons import COMPARISONS
from demur.runs import Run
from tests.conftest import STUDY, TINIEST, Command
from tests.test_cli import expect_error


@pytest.mark.usefixtures("quick_table")
def test_an_interrupt_loses_at_most_one_attack_of_the_archive(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["methods-digits", *TINIEST, "--only", "pgdat-rr", "--archive", "kept"]
    original = evaluating.attack_and_report

    def interrupted(loaded: Any, label: str, *rest: Any) -> object:
        if label == "pgd-10:steps=1":
            raise KeyboardInterrupt
        return original(loaded, label, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(evaluating, "attack_and_report", interrupted)
        assert command(*STUDY, *arguments)[0] == 130
    code, page, err = command(*STUDY, *arguments[:-2], "--from", "kept")
    assert code == 0, err
    assert "| pgdat-rr | R-Con |" in page, "the archive has the score of the head"
    assert "- pgdat-rr, seed 0: not measured yet: pgd-10:steps=1\n" in page
    assert command(*STUDY, *arguments)[0] == 0
    assert "## Missing" not in command(*STUDY, *arguments[:-2], "--from", "kept")[1]


@pytest.mark.usefixtures("quick_table")
def test_an_archive_with_more_scores_is_not_overwritten(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = replace(COMPARISONS["methods-digits"], learned=("GDA",))
    monkeypatch.setitem(COMPARISONS, "methods-digits", learned)
    arguments = ["methods-digits", *TINIEST, "--only", "pgdat-rr"]
    assert command(*STUDY, *arguments, "--archive", "kept")[0] == 0
    (clean,) = Path("kept").glob("*/records/clean-test-*.json")
    before = clean.read_text(encoding="utf-8")
    assert "GDA" in before
    deleted = list(Path("kept").glob("*/records/pgd-20-test-*"))
    for path in deleted:
        path.unlink()
    code, _, err = command(*STUDY, *arguments, "--archive", "kept")
    assert code == 0, err
    assert clean.read_text(encoding="utf-8") == before
    assert all(path.exists() for path in deleted)


@pytest.mark.usefixtures("quick_table")
def test_a_complete_archive_is_written_once(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["methods-digits", *TINIEST, "--only", "pgdat-rr", "--archive", "kept"]
    written: list[str] = []

    def counting_archive(loaded: LoadedRun, target: Path, *rest: Any, **more: Any) -> Run:
        written.append(target.name)
        return archive(loaded, target, *rest, **more)

    monkeypatch.setattr(evaluate, "archive", counting_archive)
    assert command(*STUDY, *arguments)[0] == 0
    assert len(written) == 4, "after each of three attacks and at the end"
    assert command(*STUDY, *arguments)[0] == 0
    assert len(written) == 5


@pytest.mark.usefixtures("quick_table")
def test_missing_scores_are_named(command: Command, in_empty_folder: Path) -> None:
    arguments = ["methods-digits", *TINIEST, "--only", "pgdat-rr"]
    assert command(*STUDY, *arguments)[0] == 0
    (run,) = Path("runs").iterdir()
    assert command("export", "--archive", str(run), "-o", "kept/rr", "--only", "Con")[0] == 0
    code, page, err = command(*STUDY, *arguments, "--from", "kept")
    assert code == 0, err
    assert "| pgdat-rr | Con |" in page
    assert "| R-Con |" not in page
    assert "- pgdat-rr, seed 0: without R-Con: " in page
    (complete,) = (run / "records").glob("pgd-20-test-*.npz")
    for end in (".npz", ".json"):
        stored = next(Path("kept/rr/records").glob(f"pgd-20-test-*{end}"))
        stored.write_bytes(complete.with_suffix(end).read_bytes())
    code, page, err = command(*STUDY, *arguments, "--from", "kept")
    assert code == 0, err
    assert "- pgdat-rr, seed 0: without R-Con under clean, pgd-10:steps=1\n" in page


@pytest.mark.usefixtures("quick_table")
def test_stored_records_are_read_and_missing_ones_named(
    command: Command, in_empty_folder: Path
) -> None:
    arguments = ["methods-digits", *TINIEST, "--only"]
    code, out, err = command(*STUDY, *arguments, "pgdat-rr", "--json")
    assert code == 0, err
    (trained,) = json.loads(out)
    run = in_empty_folder / "runs" / trained["run"]
    for path in (run / "records").glob("pgd-20-*"):
        path.unlink()
    assert command("export", "--archive", str(run), "-o", "kept/rr")[0] == 0
    arguments += ["pgdat,pgdat-rr"]
    before = {path: path.stat().st_mtime_ns for path in in_empty_folder.rglob("*")}
    code, page, err = command(*STUDY, *arguments, "--seeds", "2", "--from", "kept")
    assert code == 0, err
    assert before == {path: path.stat().st_mtime_ns for path in in_empty_folder.rglob("*")}
    assert "- pgdat, seeds 0, 1: not measured yet\n" in page
    assert "- pgdat-rr, seed 0: not measured yet: pgd-20\n" in page
    assert "## pgd-20\n\nNot measured yet." in page
    assert "| pgdat-rr (1 of 2 seeds) | R-Con |" in page
    assert "| pgdat-rr | 0 | rr |" in page
    code, page, err = command(*STUDY, *arguments, "--first-seed", "3", "--from", "kept")
    assert (code, page) == (2, "")
    assert "kept holds no record of what methods-digits asks for" in err
    lines = json.loads(command(*STUDY, *arguments, "--from", "kept", "--json")[1])
    assert lines[1]["rows"] == [row for row in trained["rows"] if row["attack"] != "pgd-20"]
    (arrays,) = Path("kept/rr/records").glob("clean-test-*.npz")
    moved = arrays.rename("moved")
    code, page, err = command(*STUDY, *arguments, "--from", "kept")
    assert (code, page) == (2, ""), "no result comes from this run"
    assert f"{arrays} is missing, though {arrays.stem}.json is there" in err
    moved.rename(arrays)
    assert command("export", "--archive", str(run), "-o", "kept/again", "--only", "R-Con")[0] == 0
    expect_error(
        command(*STUDY, *arguments, "--from", "kept"), "again and rr in kept have the same recipe"
    )


def test_a_folder_without_results_is_an_error_and_keeps_the_page(
    command: Command, tiny_run: Run, in_empty_folder: Path
) -> None:
    copytree(tiny_run.path, in_empty_folder / "kept" / "tiny")
    Path("page.md").write_text("# old", encoding="utf-8")
    code, out, err = command(*STUDY, "methods-digits", "--from", "kept", "-o", "page.md")
    assert (code, out) == (2, "")
    assert err == (
        "demur: kept holds no record of what methods-digits asks for; name another folder\n"
    )
    assert Path("page.md").read_text(encoding="utf-8") == "# old"


@pytest.mark.usefixtures("quick_table")
def test_a_damaged_archive_loses_only_its_own_entry(
    command: Command, in_empty_folder: Path
) -> None:
    arguments = ["methods-digits", *TINIEST, "--only", "pgdat,pgdat-rr"]
    code, _, err = command(*STUDY, *arguments, "--archive", "kept")
    assert code == 0, err
    (arrays,) = Path("kept").glob("pgdat-rr-*/records/clean-test-*.npz")
    arrays.unlink()
    broken = Path("kept/broken/recipe.txt")
    broken.parent.mkdir()
    broken.write_text("Recipe(", encoding="utf-8")
    reason = f"pgdat-rr, seed 0: {arrays} is missing, though {arrays.stem}.json is there"
    code, page, err = command(*STUDY, *arguments, "--from", "kept", "-o", "page.md")
    assert code == 2
    assert f"broken is skipped: {broken} cannot be read" in err
    assert f"demur: 1 of 2 lines could not be made; {reason}" in err
    assert f"- {reason}" in page
    assert "| pgdat | Con |" in page
    assert Path("page.md").read_text(encoding="utf-8") == page.removesuffix("\n")
