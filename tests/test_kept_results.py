"""The runs in results/ agree with the documentation pages."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest

from demur import metrics
from demur.evaluate import values
from demur.paper.comparisons import COMPARISONS
from demur.paper.scales import COMPARED_CHANGES
from demur.recipes import RECIPES, with_changes
from demur.rejectors import Con, RCon
from demur.runs import Record, Run, runs_in
from demur.spec import digest
from speed import speed_sentences
from study import STUDIES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SHORT = "cifar10-pgdat-rr-short"
SHORT_ATTACKS = ("clean", "pgd-10", "pgd-100")
MADE_BY = {
    "cifar10-pgdat-rr-seed0": ("cifar10-pgdat-rr", "bn=batch"),
    **{f"{SHORT}-seed{i}": (SHORT, f"seed={i}") for i in (0, 1, 2)},
    "pgdat-rr-seed0": (SHORT, *COMPARED_CHANGES, "selection=test"),
    "base-seed0": ("cifar10-trades-rr-awp", "epochs=36"),
    "idbh-seed0": ("cifar10-trades-rr-awp", "epochs=36", "augment=IDBH(erase=0.5)"),
    "adr-seed0": ("cifar10-trades-rr-awp", "epochs=36", "labels=ADR()"),
    "ls-seed0": ("cifar10-trades-rr-awp", "epochs=36", "labels=LabelSmoothing()"),
    "long-seed0": ("cifar10-best",),
    "cifar10-best": ("cifar10-best",),
    "cifar10-pgdat-rr": ("cifar10-pgdat-rr", "bn=batch"),
    "cifar10-trades-rr": ("cifar10-trades-rr",),
    "silu-seed0": ("cifar10-trades-rr-awp", "epochs=36", "net.activation=silu"),
}


@pytest.mark.parametrize("table", ["methods-cifar10", "study-cifar10"])
def test_every_line_of_a_page_has_a_stored_run_of_its_recipe(table: str) -> None:
    page = (ROOT / "docs" / f"{table}.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\d) \| (\S+) \| ([0-9a-f]{12}) \|$", page, re.MULTILINE)
    assert {name for _, _, name, _ in rows} == {run.name for run in runs_in(RESULTS / table)}
    for line, seed, name, shown in rows:
        recipe = (COMPARISONS | STUDIES)[table].recipe(line, int(seed))
        assert digest(recipe)[:12] == shown
        assert Run.open(str(RESULTS / table / name)).recipe == recipe


def test_every_other_stored_run_has_its_documented_recipe() -> None:
    folders = (
        RESULTS,
        RESULTS / "restarts-cifar10",
        RESULTS / "best-cifar10",
        RESULTS / "zoo-cifar10",
    )
    runs = {run.name: run.recipe for folder in folders for run in runs_in(folder)}
    made = {
        name: with_changes(RECIPES[recipe], ["data.split=paper", *changes])
        for name, (recipe, *changes) in MADE_BY.items()
    }
    assert runs == made


def short_records(runs: str) -> dict[str, list[Record]]:
    """Records of three seeds on all test images, by attack."""
    seeds = [Run(RESULTS / f"{runs}-seed{seed}") for seed in (0, 1, 2)]
    made = [one for run in seeds for one in run.records() if len(one.y) == 10_000]
    return {name: [one for one in made if one.label == name] for name in SHORT_ATTACKS}


@pytest.mark.parametrize(
    ("page", "line", "runs"),
    [
        ("results/README.md", "36 epochs, averaged, seeds 0, 1, 2", SHORT),
        ("results/README.md", "36 epochs, seeds 0, 1, 2", "methods-cifar10/pgdat-rr"),
        ("results/README.md", "without the head, seeds 0, 1, 2", "methods-cifar10/pgdat"),
        ("docs/methods.md", f"`{SHORT}`: averaged, 36 epochs", SHORT),
        (
            "docs/methods.md",
            "not averaged, rising during 30%, 36 epochs",
            "methods-cifar10/pgdat-rr",
        ),
        (
            "docs/methods.md",
            "PGD-AT alone, not averaged, rising during 30%, 36 epochs",
            "methods-cifar10/pgdat",
        ),
    ],
)
def test_the_numbers_of_the_short_recipes_are_those_of_their_records(
    page: str, line: str, runs: str
) -> None:
    """Accuracies of each seed or their mean; TPR-95 and AUROC under PGD-10 of each score."""
    (row,) = [r for r in (ROOT / page).read_text().splitlines() if r.startswith(f"| {line} |")]
    records = short_records(runs)
    shown = [cell.strip(" *") for cell in row.strip("| ").split("|")][1:]
    for name, cell in zip(SHORT_ATTACKS, shown[:3], strict=True):
        right = [100 * float(one.correct.mean()) for one in records[name]]
        assert len(right) == 3
        assert cell in (", ".join(f"{value:.1f}" for value in right), spread(right))
    points, areas = [], []
    scores = [Con(), RCon()] if "rr" in runs else [Con()]
    for score in scores:
        rows = [(values(score, one), one.correct) for one in records["pgd-10"]]
        accuracies = [metrics.paper_stats(*pair, 0.95).accuracy for pair in rows]
        points.append(spread([100 * value for value in accuracies]))
        area = mean(metrics.auroc(*pair) for pair in rows)
        areas.append(f"{area:.3f}".removeprefix("0"))
    last_cells = [cell.removesuffix(" / -") for cell in shown[-2:]]
    assert last_cells == [" / ".join(points), " / ".join(areas)]


README_ROWS = {
    ("PGD-100, 8/255", "3 seeds"): "pgd-100",
    ("PGD-100 x 10, 8/255", "1 seed"): "pgd-100:restarts=10",
    ("none", "3 seeds"): "clean",
    ("multi-target, 8/255", "1 seed"): "multi-target:restarts=1",
    ("GAMA-PGD, 8/255", "1 seed"): "gama-pgd:restarts=1,keep=max_objective",
    ("PGD-100, 16/255", "1 seed"): "pgd-100:eps=16/255",
}


@pytest.mark.parametrize(("attack", "nets"), README_ROWS)
def test_the_readmes_table_is_that_of_the_records(attack: str, nets: str) -> None:
    """TPR-95 and AUROC of confidence and of R-Con on the same net, and their difference."""
    text = (ROOT / "README.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(attack)} \| {nets}, .*", text, re.MULTILINE)
    folder = "methods-cifar10/pgdat-rr" if nets == "3 seeds" else "paper-cifar10/pgdat-rr"
    runs = [Run(RESULTS / f"{folder}-seed{seed}") for seed in range(int(nets[0]))]
    label = README_ROWS[attack, nets]
    records = [one for run in runs for one in run.records()
               if one.label == label and len(one.y) == 10_000]  # fmt: skip
    assert len(records) == len(runs)
    areas = []
    for score in (Con(), RCon()):
        pairs = [(values(score, one), one.correct) for one in records]
        accuracies = [100 * metrics.paper_stats(*pair, 0.95).accuracy for pair in pairs]
        shown = spread(accuracies) if len(accuracies) > 1 else f"{accuracies[0]:.1f}"
        areas.append(mean(metrics.auroc(*pair) for pair in pairs))
        assert f"| {shown}, {areas[-1]:.3f} |".replace(", 0.", ", .") in row
    assert f"| {areas[1] - areas[0]:+.3f} [".replace("0.", ".") in row


def test_the_numbers_of_the_speed_page_are_those_of_its_benchmark() -> None:
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    (name,) = re.findall(r"all in one run \(`(benchmarks/\S+)`\)", page)
    report = json.loads((ROOT / name).read_text())
    for line in report["lines"]:
        epoch, memory = f"{line['epoch_s']:.1f}", f"{line['memory_gib']:.1f}"
        shown = f"{line['images_per_s']:,.0f} | {100 * line['share_of_peak']:.0f}% | {memory} |"
        batch = f"| {line['batch_size']} | {line['bn']}"
        assert re.search(rf"{re.escape(batch)}[^|]*\| \**{epoch}\** \| {re.escape(shown)}", page)
    eager, _, fast, *_ = (line["epoch_s"] for line in report["lines"])
    assert f"That is {eager / fast:.1f} times the eager loop" in page
    assert f"PGD-100 on 10,000 images takes {report['attack']['seconds']:.1f} s" in page
    lines = speed_sentences({"head": report["head"]})
    for mode, sentence in zip(report["head"], lines, strict=True):
        cost, apart, more, share = re.findall(r"[-+]?\d+(?:\.\d+)?", sentence)
        assert f"| {mode} | {cost}% | {apart}% | {more} | {share}% |" in page


def spread(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values):.1f}"


def test_every_folder_of_a_documented_table_has_its_runs() -> None:
    pages = [ROOT / "README.md", RESULTS / "README.md", *(ROOT / "docs").glob("*.md")]
    words = " ".join(" ".join(page.read_text().split()) for page in pages)
    command = r"(?:demur paper study recipes|python benchmarks/study.py)"
    asked = set(re.findall(command + r" (\S+) [^`]*?--from (results\S*?)[` ]", words))
    assert {table for table, _ in asked} == {"methods-cifar10", "study-cifar10"}
    for name, folder in asked:
        table = (COMPARISONS | STUDIES)[name]
        lines = {digest(table.recipe(line, seed)) for line in table.entries for seed in range(3)}
        runs = runs_in(ROOT / folder)
        assert runs, folder
        assert {digest(run.recipe) for run in runs} <= lines, folder


def test_the_ablation_of_the_best_net_is_that_of_its_records() -> None:
    page = (RESULTS / "README.md").read_text()
    right = {
        name: np.asarray(Run(RESULTS / "best-cifar10" / f"{name}-seed0").records()[0].correct)
        for name in ("base", "idbh", "adr", "ls", "silu")
    }
    lines = {
        "base": "| base |", "idbh": "| + IDBH,", "adr": "| + ADR |",
        "ls": "| + label smoothing 0.1 |", "silu": "| SiLU in place of ReLU |",
    }  # fmt: skip
    for name, start in lines.items():
        (line,) = [line for line in page.splitlines() if line.startswith(start)]
        shown = float(line.split("|")[2])
        assert shown == round(100 * float(right[name].mean()), 1)
        if name != "base":
            difference = right[name].astype(float) - right["base"]
            half = 1.96 * difference.std() / len(difference) ** 0.5
            assert f"{100 * difference.mean():+.1f} ± {100 * half:.1f}" in line
