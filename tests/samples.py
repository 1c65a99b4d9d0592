"""How many samples a test draws: few in the suite, many in `make exhaustive`.

    def test_a_risk_holds(samples: Samples) -> None:
        runs = samples(400, 1000)

A test with the fixture `samples` has a long version, and so has a test of hypothesis that takes its
number of examples from `examples`. A test that has no short version is marked
`@pytest.mark.exhaustive`. DEMUR_EXHAUSTIVE=1 runs the long versions; a fraction, for example 0.01,
runs that part of them.
"""

import json
import os
import subprocess
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path

import pytest

SCALE = float(os.environ.get("DEMUR_EXHAUSTIVE") or 0)
EXHAUSTIVE = SCALE > 0
MORE_EXAMPLES = 20  # times as many examples of hypothesis
REASON = "long: make exhaustive"
RESULTS = Path(__file__).parents[1] / "build" / "exhaustive.jsonl"
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


@cache
def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    run = subprocess.run(words, cwd=RESULTS.parents[1], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def note_result(report: pytest.TestReport, file: Path = RESULTS) -> None:
    """Append how a long version ended, at once: a run of hours may be stopped."""
    is_last = report.when == "call" or not report.passed
    if "PYTEST_XDIST_WORKER" in os.environ or "exhaustive" not in report.keywords or not is_last:
        return
    line = {
        "test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1),
        "n": sum(int(str(n)) for name, n in report.user_properties if name == "n"),
        "scale": SCALE, "commit": _commit(), "date": str(date.today()),
    }  # fmt: skip
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
