"""Closed-form intervals of AUROC, and resamples that all rejectors share."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from demur import metrics
from demur.metrics import Resamples
from tests.scored_sets import bootstrap

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def random_scores(seed: int, n: int, ties: bool = False) -> tuple[Floats, Floats, Bools]:
    rng = np.random.default_rng(seed)
    correct = rng.random(n) < 0.7
    one = rng.normal(size=n) + correct
    other = one + rng.normal(size=n)
    return (one.round(0), other.round(0), correct) if ties else (one, other, correct)


@pytest.mark.parametrize("ties", [False, True])
def test_intervals_are_close_to_the_bootstrap(ties: bool) -> None:
    one, other, correct = random_scores(0, 3000, ties)
    closed_form = metrics.auroc_interval(one, correct)
    bootstrapped = bootstrap(metrics.auroc, one, correct, resamples=400)
    assert np.allclose(closed_form, bootstrapped, atol=0.004)
    gap = metrics.auroc_difference(one, other, correct)
    again = bootstrap(
        lambda a, b, c: metrics.auroc(a, c) - metrics.auroc(b, c),
        one, other, correct, resamples=400,
    )  # fmt: skip
    assert np.allclose(gap[1:3], again, atol=0.004)


@pytest.mark.parametrize("n_wrong", [5, pytest.param(20, marks=pytest.mark.exhaustive), 100])
def test_intervals_have_their_nominal_coverage(n_wrong: int) -> None:
    """Two normals at distance 2.5, and the same with noise: both areas are known."""
    rng, distance, runs = np.random.default_rng(n_wrong), 2.5, 200
    one, other = NormalDist().cdf(distance / 2**0.5), NormalDist().cdf(distance / 2)
    correct = np.arange(300 + n_wrong) < 300
    covered = np.zeros(2)
    for _ in range(runs):
        score = rng.normal(size=len(correct)) + distance * correct
        noisy = score + rng.normal(size=len(correct))
        lo, hi = metrics.auroc_interval(score, correct)
        gap = metrics.auroc_difference(score, noisy, correct)
        covered += lo <= one <= hi, gap.lo <= one - other <= gap.hi
    assert (covered / runs > 0.92).all()


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_every_interval_contains_its_estimate(seed: int, n: int) -> None:
    one, other, correct = random_scores(seed, n, ties=seed % 2 == 0)
    lo, hi = metrics.auroc_interval(one, correct)
    assert 0 <= lo <= metrics.auroc(one, correct) <= hi <= 1
    gap = metrics.auroc_difference(one, other, correct)
    assert -1 <= gap.lo <= gap.value <= gap.hi <= 1
    assert 0 <= gap.p <= 1
    itself = metrics.auroc_difference(one, one, correct)
    assert itself.value == 0
    assert itself.p == 1


def test_the_interval_of_a_perfect_ranking_is_not_a_point() -> None:
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
def test_shared_resamples_equal_the_plain_bootstrap(ties: bool) -> None:
    one, _, correct = random_scores(3, 300, ties)
    expected = bootstrap(
        lambda s, c: metrics.paper_stats(s, c).accuracy, one, correct, resamples=200
    )
    accuracies = metrics.paper_accuracy(one, correct, 0.95)(Resamples.of(300, 200))
    assert metrics.percentiles(accuracies, 0.95) == expected


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0.5, 0.9, 0.95, 1.0]))
def test_the_accuracy_of_every_resample_equals_paper_stats(seed: int, n: int, tpr: float) -> None:
    one, _, correct = random_scores(seed, n, ties=seed % 2 == 0)
    if seed % 3 == 0:
        correct = np.sort(correct)  # long stretches without a corner of the ROC curve
        one = np.sort(one)
    resamples = Resamples.of(n, 8, seed)
    found = metrics.paper_accuracy(one, correct, tpr)(resamples)
    for counts, accuracy in zip(resamples.counts.T, found, strict=True):
        sample = np.repeat(np.arange(n), counts.astype(int))
        point = metrics.paper_stats(one[sample], correct[sample], tpr)
        assert accuracy == point.accuracy


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_the_identity_resample_gives_the_sample_statistics(seed: int, n: int) -> None:
    one, _, correct = random_scores(seed, n, ties=seed % 2 == 0)
    identity = Resamples(np.ones((n, 1), dtype=np.float32))
    found = metrics.paper_accuracy(one, correct, 0.95)(identity)[0]
    assert found == metrics.paper_stats(one, correct).accuracy
    accepted = one >= np.median(one)
    assert identity.shares(correct, accepted)[0] == correct[accepted].mean()
    assert identity.shares(correct, np.zeros(n, dtype=bool))[0] == 0
