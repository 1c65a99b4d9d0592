"""Two attacks, two rejectors or two nets, image by image."""

import csv
import io
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, binomtest

import demur
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, compare, run_attack
from demur.evaluate.paired_differences import PairedCounts, paired_shares
from demur.recipes import attack
from demur.runs import Run
from tests.conftest import Command, samples
from tests.test_cli import expect_error

__all__ = ["samples"]


def outcomes(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    parts = (both, first, second, neither)
    pair = [(True, True), (True, False), (False, True), (False, False)]
    rows = np.array([p for p, count in zip(pair, parts, strict=True) for _ in range(count)])
    return rows[:, 0], rows[:, 1]


def test_the_test_is_exact_and_the_interval_contains_the_difference() -> None:
    for both, b, c in itertools.product((0, 3), (0, 1, 7), (0, 2, 9)):
        first, second = outcomes(both, b, c, 5)
        found = paired_shares(first, second)
        assert found.value == pytest.approx((b - c) / len(first))
        assert -1 <= found.lo <= found.value <= found.hi <= 1
        assert found.lo < found.hi
        expected = binomtest(b, b + c).pvalue if b + c else 1.0
        assert found.p == pytest.approx(expected)
    counts = PairedCounts.of("wrong", ("a", "b"), *outcomes(4, 3, 2, 1))
    assert (counts.n, counts.both, counts.only_first, counts.only_second) == (10, 4, 3, 2)


def test_the_interval_covers_the_true_difference() -> None:
    """Exact coverage over all multinomial counts of a small sample."""
    n, b, c = 30, 0.15, 0.05
    covered = 0.0
    for i in range(n + 1):
        for j in range(n - i + 1):
            weight = binom.pmf(i, n, b) * binom.pmf(j, n - i, c / (1 - b))
            if weight > 1e-12:
                found = paired_shares(*outcomes(0, i, j, n - i - j))
                covered += weight * (found.lo <= b - c <= found.hi)
    assert 0.94 <= covered <= 0.99


@pytest.fixture(scope="module")
def runs(scored_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two copies of a run with two records of all images, one of them with another of 40."""
    home = tmp_path_factory.mktemp("compared")
    for name in ("a", "b"):
        shutil.copytree(scored_run.path, home / "runs" / name)
    loaded = LoadedRun(Run(home / "runs" / "a"), "cpu")
    spec = attack("pgd-20:steps=1", loaded.run.recipe)
    run_attack(loaded, "pgd-1", spec, RecordOptions(n=40))
    return home


def test_counts_are_those_of_the_images(runs: Path) -> None:
    run = Run(runs / "runs" / "a")
    clean, pgd = (next(r for r in run.records() if r.label == k) for k in ("clean", "pgd-3"))
    wrong, errors, rejected = compare(run, ["clean", "pgd-3"], "R-Con")
    assert wrong.both == int((~clean.correct & ~pgd.correct).sum())
    assert wrong.only_second == int((clean.correct & ~pgd.correct).sum())
    assert (wrong.first, wrong.second, wrong.n) == ("clean", "pgd-3", len(clean.y))
    evaluation = RejectorEvaluation.of(LoadedRun(run, "cpu"))
    accepted = [evaluation.accepted("R-Con", one) for one in (clean, pgd)]
    first, second = accepted[0] & ~clean.correct, accepted[1] & ~pgd.correct
    assert (errors.both, errors.only_second) == ((first & second).sum(), (second & ~first).sum())
    assert rejected.only_first == int(
        (~accepted[0] & clean.correct & ~(~accepted[1] & pgd.correct)).sum()
    )
    assert demur.compare is compare


def test_rejectors_are_compared_at_one_operating_point(runs: Path) -> None:
    run = LoadedRun(Run(runs / "runs" / "a"), "cpu")
    errors, rejected = compare(run, "pgd-3", ["Con", "R-Con"], tpr=0.8)
    assert (errors.what, errors.first, errors.second) == ("wrong and accepted", "Con", "R-Con")
    evaluation = RejectorEvaluation.of(run, 0.8)
    record = next(r for r in run.run.records() if r.label == "pgd-3")
    con, rcon = (evaluation.accepted(name, record) & ~record.correct for name in ("Con", "R-Con"))
    assert (errors.only_first, errors.only_second) == ((con & ~rcon).sum(), (rcon & ~con).sum())
    assert rejected.n == len(record.y)


def test_equal_nets_do_not_differ(runs: Path) -> None:
    first, second = (Run(runs / "runs" / name) for name in "ab")
    (wrong,) = compare(first, "pgd-3", against=second)
    assert (wrong.only_first, wrong.only_second, wrong.difference.p) == (0, 0, 1)
    assert wrong.first.endswith("a") and wrong.second.endswith("b")


def test_what_cannot_be_compared_is_one_sentence(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    for line, words in (
        ("a pgd-3", "both sides are the same; give two attacks"),
        ("a pgd-3 pgd-3", "both sides are the same"),
        ("a pgd-3 clean pgd-1", "give one or two attacks"),
        ("a pgd-3 --rejector Con,R-Con,Energy", "at most two rejectors"),
        ("a clean pgd-1", "clean and pgd-1 attacked different images, 300 and 40 of them"),
        ("a pgd-1 --against b", "has no record of pgd-1 on test images; did you mean pgd-3"),
        ("a clean pgd-20", "has no record of pgd-20 on test images"),
        ("a clean pdg-3", "did you mean pgd-3"),
        ("a clean pgd-3 --rejector R-Kon", "the run has no rejector 'R-Kon'"),
        ("a clean pgd-3 --rejector Con --tpr 2", "TPR"),
        ("a clean pgd-3 --split tests", "no split is called"),
        ("a clean pgd-3 --format cvs", "no format is called"),
        ("c clean pgd-3", "there is no run 'c'"),
    ):
        expect_error(command("compare", *line.split()), words)


def test_the_command_writes_every_format(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    words = ("compare", "a", "clean", "pgd-3", "--rejector", "R-Con", "--format")
    code, out, err = command(*words, "json")
    assert (code, err) == (0, "")
    counts = json.loads(out)[0]["rows"]
    assert [one["images"] for one in counts] == [
        "wrong", "wrong and accepted", "correct and rejected",
    ]  # fmt: skip
    header, *rows = csv.reader(io.StringIO(command(*words, "csv")[1]))
    assert header[-5:] == ["only second", "first - second", "first - second low",
                           "first - second high", "p"]  # fmt: skip
    assert [row[4] for row in rows] == [one["only second"] for one in counts]
    assert "| wrong and accepted |" in command(*words, "markdown")[1]
    assert r"\bottomrule" in command(*words, "latex")[1]
    text = command(*words, "text")[1]
    assert "first: clean; second: pgd-3" in text
