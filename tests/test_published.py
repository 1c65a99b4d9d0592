"""The paper's results beside ours, and fitted rejectors in tables."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from demur.paper.comparisons import (
    COMPARISONS,
    RADII,
    PublishedScore,
    TrainingResult,
    published_table2,
)
from demur.paper.pages import comparison_page
from demur.recipes import RECIPES
from tests.conftest import STUDY, TINIEST, Command


def cells(page: str, *begins: str) -> Sequence[str]:
    """Cells of the only table row that begins with these cells."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {' | '.join(begins)} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_papers_published_table2_has_accuracy_and_auroc_for_each_row_and_attack() -> None:
    published = published_table2(("clean", *RADII))
    assert len(published) == 15 * 4
    assert published["pgdat-rr", "R-Con", "pgd-100:restarts=10"] == PublishedScore(58.21, 0.776)
    assert published["trades-rr", "R-Con", "pgd-100-l2:restarts=10"] == PublishedScore(68.97, 0.793)
    assert all(20 < cell.right < 100 and 0.4 < cell.auroc < 1 for cell in published.values())


def test_published_results_match_existing_rows_and_scores() -> None:
    table = COMPARISONS["methods-cifar10"]
    for entry, score, attack in table.published:
        assert attack in table.attacks
        assert score in (*table.learned, "Con", table.entries[entry].head_rejector[0])
    known = RECIPES["cifar10-pgdat-short"].rejectors()
    assert set(table.learned) <= set(known)


def test_tables_without_published_results_do_not_mention_the_paper() -> None:
    results = [TrainingResult("rr", 0, "0" * 64, "rr", failure="not measured yet")]
    page = comparison_page(COMPARISONS["methods-digits"], results, "demur x", "1.0")
    assert "the paper`" not in page


def test_fitted_rejectors_are_scored_archived_and_read_again(
    command: Command, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = ("clean", "pgd-10:steps=1")
    published = {
        ("pgdat-rr", "R-Con", "clean"): PublishedScore(86.91, 0.861),
        ("pgdat-rr", "GDA", "clean"): PublishedScore(82.35, 0.453),
    }
    table = replace(
        COMPARISONS["methods-digits"], attacks=attacks, learned=("KD", "GDA"), published=published
    )
    monkeypatch.setitem(COMPARISONS, "methods-digits", table)
    words = ["methods-digits", *TINIEST, "--only", "pgdat-rr"]
    code, page, err = command(*STUDY, *words, "--archive", "kept")
    assert code == 0, err
    clean, attacked = page.split("## pgd-10:steps=1")
    assert "86.91, 0.861" in cells(clean, "pgdat-rr", "R-Con")
    assert "86.91" not in attacked
    assert cells(clean, "pgdat-rr, the paper") == ["pgdat-rr, the paper", "", "82.35, 0.453"]
    (learned,) = [line for line in attacked.splitlines() if line.count(", 0.") == 2]
    assert learned.startswith("| pgdat-rr | ")
    code, again, err = command(*STUDY, *words, "--from", "kept")
    assert code == 0, err
    assert learned in again
