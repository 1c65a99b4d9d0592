"""Scores with right and wrong answers to test metrics on: tied, spread, with -inf, and made up."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from demur.metrics import BoolArray, FloatArray, Interval, percentiles
from tests.samples import examples

INF = math.inf
TIED = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0])
SPREAD = st.floats(-10, 10)
Set = tuple[FloatArray, BoolArray]
MANY, SOME, FEW = (settings(deadline=None, max_examples=examples(most)) for most in (150, 50, 25))


def as_set(rows: list[tuple[float, bool]]) -> Set:
    scores, flags = zip(*rows, strict=True)
    return np.array(scores, dtype=np.float64), np.array(flags, dtype=np.bool_)


def sets(score: st.SearchStrategy[float], most: int = 40) -> st.SearchStrategy[Set]:
    return st.lists(st.tuples(score, st.booleans()), min_size=1, max_size=most).map(as_set)


FINITE = st.one_of(sets(TIED), sets(SPREAD))
WITH_NEVER = st.one_of(sets(st.one_of(TIED, st.just(-INF))), FINITE)


def images(n: int, seed: int = 0, step: float = 0.0) -> Set:
    generator = np.random.default_rng(seed)
    score = generator.normal(size=n)
    correct = generator.random(n) < 1 / (1 + np.exp(-2 * score))
    return (np.round(score / step) * step if step else score), correct


def bootstrap(statistic: Callable[..., float], *arrays: NDArray[Any], resamples: int) -> Interval:
    """Percentile interval of a statistic over resamples of the images."""
    generator, n = np.random.default_rng(0), len(arrays[0])
    drawn = (generator.integers(n, size=n) for _ in range(resamples))
    return percentiles(np.array([statistic(*(a[rows] for a in arrays)) for rows in drawn]), 0.95)
