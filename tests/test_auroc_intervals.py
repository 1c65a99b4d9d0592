"""Intervals of AUROC without redrawing, and redraws that all rejectors share."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from demur import metrics
from demur.metrics import Resamples

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def drawn(seed: int, n: int, ties: bool = False) -> tuple[Floats, Floats, Bools]:
    rng = np.random.default_rng(seed)
    correct = rng.random(n) < 0.7
    one = rng.normal(size=n) + correct
    other = one + rng.normal(size=n)
    return (one.round(0), other.round(0), correct) if ties else (one, other, correct)


@pytest.mark.parametrize("ties", [False, True])
def test_intervals_are_those_of_redrawing(ties: bool) -> None:
    one, other, correct = drawn(0, 3000, ties)
    quick = metrics.auroc_interval(one, correct)
    slow = metrics.bootstrap(metrics.auroc, one, correct, within=correct, resamples=400)
    assert np.allclose(quick, slow, atol=0.004)
    gap = metrics.auroc_difference(one, other, correct)
    again = metrics.paired_difference(
        metrics.auroc, one, other, correct, within=correct, resamples=400
    )
    assert gap.value == again.value
    assert np.allclose(gap[1:3], again[1:3], atol=0.004)


@pytest.mark.parametrize("wrongs", [5, 20, 100])
def test_intervals_cover_the_truth_as_often_as_they_say(wrongs: int) -> None:
    """Two normals 2.5 apart, and the same with noise: both areas are known."""
    rng, apart, runs = np.random.default_rng(wrongs), 2.5, 300
    one, other = NormalDist().cdf(apart / 2**0.5), NormalDist().cdf(apart / 2)
    correct = np.arange(300 + wrongs) < 300
    covered = np.zeros(2)
    for _ in range(runs):
        score = rng.normal(size=len(correct)) + apart * correct
        noisy = score + rng.normal(size=len(correct))
        lo, hi = metrics.auroc_interval(score, correct)
        gap = metrics.auroc_difference(score, noisy, correct)
        covered += lo <= one <= hi, gap.lo <= one - other <= gap.hi
    assert (covered / runs > 0.92).all()


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_any_scores_have_an_interval_around_their_area(seed: int, n: int) -> None:
    one, other, correct = drawn(seed, n, ties=seed % 2 == 0)
    lo, hi = metrics.auroc_interval(one, correct)
    assert 0 <= lo <= metrics.auroc(one, correct) <= hi <= 1
    gap = metrics.auroc_difference(one, other, correct)
    assert -1 <= gap.lo <= gap.value <= gap.hi <= 1
    assert 0 <= gap.p <= 1
    itself = metrics.auroc_difference(one, one, correct)
    assert itself.value == 0
    assert itself.p == 1


def test_a_perfect_ranking_is_not_certain() -> None:
    score, correct = np.arange(20.0), np.arange(20) >= 10
    lo, hi = metrics.auroc_interval(score, correct)
    assert hi == 1
    assert 0.6 < lo < 0.9
    assert metrics.auroc_interval(score, np.ones(20, dtype=bool)) == (0, 1)
    lo, hi = metrics.auroc_interval(np.full(20, -np.inf), correct)
    assert lo < 0.5 < hi
    noise = np.random.default_rng(0).random(20)
    assert 0 < metrics.auroc_difference(score, noise, correct).p < 1


@pytest.mark.parametrize("ties", [False, True])
def test_redraws_give_what_the_slow_bootstrap_gives(ties: bool) -> None:
    one, _, correct = drawn(3, 300, ties)
    slow = metrics.bootstrap(
        lambda s, c: metrics.paper_stats(s, c).accuracy, one, correct, resamples=200
    )
    redrawn = Resamples.of(300, 200).paper_accuracies(one, correct, 0.95)
    assert metrics.percentiles(redrawn, 0.95) == slow


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0.5, 0.9, 0.95, 1.0]))
def test_every_redraw_is_measured_as_a_sample_of_its_own(seed: int, n: int, tpr: float) -> None:
    one, _, correct = drawn(seed, n, ties=seed % 2 == 0)
    if seed % 3 == 0:
        correct = np.sort(correct)  # long ways without a corner
        one = np.sort(one)
    redraws = Resamples.of(n, 8, seed)
    found = redraws.paper_accuracies(one, correct, tpr)
    for counts, accuracy in zip(redraws.counts, found, strict=True):
        sample = np.repeat(np.arange(n), counts)
        point = metrics.paper_stats(one[sample], correct[sample], tpr)
        assert accuracy == point.accuracy


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_a_redraw_that_changes_nothing_is_the_sample(seed: int, n: int) -> None:
    one, _, correct = drawn(seed, n, ties=seed % 2 == 0)
    every = Resamples(np.ones((1, n), dtype=np.int32))
    found = every.paper_accuracies(one, correct, 0.95)[0]
    assert found == metrics.paper_stats(one, correct).accuracy
    accepted = one >= np.median(one)
    assert every.shares(correct, accepted)[0] == correct[accepted].mean()
    assert every.shares(correct, np.zeros(n, dtype=bool))[0] == 0
