"""What lies in results/ is what the pages say it is."""

import re
from pathlib import Path

import pytest

from demur.paper.tables import AS_COMPARED, TABLES
from demur.recipes import RECIPES, changed
from demur.runs import Run, runs_in
from demur.spec import digest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SHORT = "cifar10-pgdat-rr-short"
MADE_BY = {
    "cifar10-pgdat-rr-seed0": ("cifar10-pgdat-rr", "bn=batch"),
    "cifar10-pgdat-rr-seed0-radii": ("cifar10-pgdat-rr", "bn=batch"),
    **{f"{SHORT}-seed{seed}": (SHORT, f"seed={seed}") for seed in (0, 1, 2)},
    f"{SHORT}-4-epochs-bf16": (SHORT, "epochs=4", *AS_COMPARED),
    f"{SHORT}-4-epochs-fp32": (SHORT, "epochs=4", "precision=fp32", *AS_COMPARED),
    f"{SHORT}-bn-train": (SHORT, "bn=train", *AS_COMPARED),
}


@pytest.mark.parametrize("table", ["methods-cifar10", "study-cifar10"])
def test_every_figure_of_a_page_comes_from_a_kept_run_of_the_recipe_of_its_line(table: str) -> None:
    page = (ROOT / "docs" / f"{table}.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\d) \| (\S+) \| ([0-9a-f]{12}) \|$", page, re.MULTILINE)
    assert {name for _, _, name, _ in rows} == {run.name for run in runs_in(RESULTS / table)}
    for line, seed, name, shown in rows:
        recipe = TABLES[table].recipe(line, int(seed))
        assert digest(recipe)[:12] == shown
        assert Run.open(str(RESULTS / table / name)).recipe == recipe


def test_every_other_kept_run_is_of_the_recipe_that_is_said_to_make_it() -> None:
    runs = {run.name: run.recipe for run in runs_in(RESULTS)}
    made = {
        name: changed(RECIPES[recipe], ["data.split=paper", *changes])
        for name, (recipe, *changes) in MADE_BY.items()
    }
    assert runs == made


def test_the_accuracies_of_the_short_recipe_are_those_of_its_records() -> None:
    page = (RESULTS / "README.md").read_text()
    (row,) = re.findall(r"^\| 36 epochs, averaged, seeds 0, 1, 2 \|(.*)$", page, re.MULTILINE)
    shown = [cell.strip() for cell in row.split("|")][:3]
    records = [Run(RESULTS / f"{SHORT}-seed{seed}").records() for seed in (0, 1, 2)]
    for attack, cell in zip(("clean", "pgd-10", "pgd-100"), shown, strict=True):
        each = [next(one for one in made if one.label == attack) for made in records]
        assert all(len(one.y) == 10_000 for one in each)
        assert cell == ", ".join(f"{100 * one.correct.mean():.1f}" for one in each)
