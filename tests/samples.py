"""How many samples a test draws: few in the suite, many in `make exhaustive`.

    def test_a_risk_holds(samples: Samples) -> None:
        runs = samples(400, 1000)

A test with the fixture `samples` has a long version, and so has a test of hypothesis that takes its
number of examples from `examples`. A test that has no short version is marked
`@pytest.mark.exhaustive`. DEMUR_EXHAUSTIVE=1 runs the long versions; a fraction, for example 0.01,
runs that part of them.
"""

import os
from collections.abc import Callable

import pytest

SCALE = float(os.environ.get("DEMUR_EXHAUSTIVE") or 0)
EXHAUSTIVE = SCALE > 0
MORE_EXAMPLES = 20  # times as many examples of hypothesis
REASON = "long: make exhaustive"
Samples = Callable[[int, int], int]


def scaled(short: int, long: int) -> int:
    """The number of samples: `short` in the suite, `long` times the fraction that was asked for."""
    return max(short, round(long * SCALE)) if EXHAUSTIVE else short


def examples(short: int) -> int:
    """The number of examples of a test of hypothesis."""
    return scaled(short, MORE_EXAMPLES * short)


@pytest.fixture
def samples(record_property: Callable[[str, object], None]) -> Samples:
    """`scaled`, which also notes the number for the report of `make exhaustive`."""

    def number(short: int, long: int) -> int:
        record_property("n", scaled(short, long))
        return scaled(short, long)

    return number


def has_long_version(item: pytest.Item) -> bool:
    """Whether a test takes longer in `make exhaustive`, or runs only there."""
    if "samples" in getattr(item, "fixturenames", ()):
        return True
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        return True
    conditions = item.iter_markers("skipif")
    return any("exhaustive" in str(mark.kwargs.get("reason")) for mark in conditions)


def mark_long_versions(items: list[pytest.Item]) -> None:
    """Skip the tests marked `exhaustive`; with DEMUR_EXHAUSTIVE mark all that have a long version.

    `-m exhaustive` then selects them.
    """
    for item in items:
        if EXHAUSTIVE and has_long_version(item):
            item.add_marker("exhaustive")
        elif not EXHAUSTIVE and item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.skip(reason=REASON))
