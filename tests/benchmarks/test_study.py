"""The ablation study: its recipes, and its tables by the options of demur paper study recipes."""

from dataclasses import replace
from pathlib import Path

import pytest

from demur.errors import BadInput, Diverged
from demur.paper.comparisons import COMPARISONS, measure_comparison
from demur.paper.paper_runs import RunSteps, StoredRuns, compute
from demur.recipes import RECIPES, Recipe, with_changes
from demur.runs import Run
from demur.spec import digest
from study import CHANGES, STUDIES, program, variants
from tests.benchmarks.conftest import Script
from tests.conftest import TINIEST


@pytest.mark.parametrize("name", STUDIES)
def test_all_entries_of_a_study_differ(name: str) -> None:
    entries = STUDIES[name].entries
    assert len({digest(recipe) for recipe in entries.values()}) == len(entries)


def test_an_entry_whose_base_diverged_is_not_trained(tmp_path: Path) -> None:
    trained: list[str] = []

    def train(recipe: Recipe, folder: Path) -> Run:
        trained.append(folder.name)
        if folder.name.startswith("plain") and recipe.seed == 1:
            raise Diverged("the loss is no longer a number")
        raise BadInput("there is no image")

    table = STUDIES["study-digits"].only(("plain", "retrofit", "rr"))
    steps = RunSteps(train, None, None)  # type: ignore[arg-type]
    made = compute(table.needs((0, 1)), tmp_path, steps, print)
    stored = StoredRuns(tmp_path, steps.open, print, required=False)
    results = measure_comparison(table, (0, 1), stored, made)
    failures = {(result.entry, result.seed): result.failure for result in results}
    assert failures["retrofit", 1] == "diverged: its base plain diverged"
    assert failures["retrofit", 0] == failures["rr", 1] == "there is no image"
    results = measure_comparison(table, (0, 1), stored)
    assert {result.failure for result in results} == {"not measured yet"}
    assert len(trained) == 5


def test_every_variant_of_the_study_changes_the_recipe() -> None:
    recipe = RECIPES["digits-pgdat-rr"]
    study = variants(recipe, RECIPES["digits-trades-rr"], average="0.98")
    assert study["rr"] == recipe
    assert set(CHANGES) - set(study) == {"bn-train"}, "the default is not a variant"
    assert study["unfitted"] == with_changes(recipe, ["head.gradient_to=head", "head_only=0.2"])
    assert study["plain"] == RECIPES["digits-pgdat"]
    assert study["trades"] == RECIPES["digits-trades-rr"]
    assert study["retrofit"] == replace(recipe, base="plain")
    assert study["trades-plain"] == RECIPES["digits-trades"]


def test_a_base_entry_resolves_to_its_run_with_the_same_seed() -> None:
    table = STUDIES["study-cifar10"]
    for seed in (0, 1):
        recipe = table.recipe("retrofit", seed)
        assert recipe.base == table.folder("plain", seed).name
        assert recipe.seed == seed
    assert table.recipe("rr", 1).base is None
    assert list(table.only(("retrofit",)).entries) == ["plain", "retrofit"]


def test_a_study_uses_cal_images_and_no_checkpoint_selection() -> None:
    table = STUDIES["study-cifar10"]
    assert table.split == "cal"
    for recipe in table.entries.values():
        assert "cal" in recipe.data.splits
        assert recipe.selection_split is None


def test_a_study_on_cal_images_with_a_retrofit(
    script: Script, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(STUDIES["study-digits"], attacks=("clean", "pgd-10:steps=1"), split="cal")
    monkeypatch.setitem(COMPARISONS, "study-digits", study)
    arguments = ["study-digits", *TINIEST, "--only", "retrofit"]
    code, page, err = script(program, *arguments, "--archive", "kept")
    assert code == 0, err
    assert "Made by `python benchmarks/study.py study-digits " in page
    assert " cal images\n" in page
    assert "held-out" in page
    assert "| retrofit | R-Con |" in page
    assert "frozen: coverage" not in page, "the threshold would come from the same images"
    runs = sorted(run.name for run in Path("runs").iterdir())
    assert sorted(copy.name for copy in Path("kept").iterdir()) == runs
    code, again, err = script(program, *arguments, "--from", "kept")
    assert code == 0, err
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert [line for line in again.splitlines() if line.startswith("|")] == rows
