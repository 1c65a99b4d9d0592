"""The drift test: its false-alarm rate by simulation, and that it notices drift."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kstest

from demur import BadInput
from demur.guards.calibration import score_histogram
from demur.serve import monitoring
from demur.serve.monitoring import SHIFTS, SPREADS, DriftMonitor, Metrics
from tests.samples import Samples

Scores = NDArray[np.float64]


def monitor(calibration: Scores, level: int, seed: int = 0) -> DriftMonitor:
    histogram = score_histogram(calibration)
    return DriftMonitor(histogram["score_edges"], histogram["score_counts"], level, seed)  # type: ignore[arg-type]


def draw(random: np.random.Generator, kind: str, n: int) -> Scores:
    """Scores of a distribution with and without ties, some of them infinite."""
    if kind == "continuous":
        return random.beta(5, 1, n)
    if kind == "discrete":
        return random.integers(0, 4, n) / 4.0
    return np.where(random.random(n) < 0.3, -math.inf, random.random(n))


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("kind", "calibration"),
    [
        ("continuous", 30), ("discrete", 400), ("gated", 30),
        pytest.param("continuous", 400, marks=LONG), pytest.param("discrete", 30, marks=LONG),
        pytest.param("gated", 400, marks=LONG),
    ],
)  # fmt: skip
def test_false_alarms_are_as_rare_as_stated(kind: str, calibration: int, samples: Samples) -> None:
    """Within n images with a probability of at most n / c, however small the calibration set."""
    random = np.random.default_rng(1)
    images, level, runs = 250, 1000, samples(40, 1000)
    alarms = 0
    for run in range(runs):
        one = monitor(draw(random, kind, calibration), level, run)
        one.observe(draw(random, kind, images))
        alarms += one.alarm
    bound = images / level
    assert alarms / runs <= bound + 3 * math.sqrt(bound * (1 - bound) / runs)


def test_ranks_are_uniform_and_bets_are_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    u = np.linspace(-1, 1, 100_001)
    for factors in (1 + SHIFTS[:, None] * u, 1 + SPREADS[:, None] * (3 * u * u - 1) / 2):
        assert factors.min() > 0
        assert np.allclose(factors.mean(1), 1, atol=1e-4)
    random = np.random.default_rng(0)
    one = monitor(draw(random, "discrete", 50), 10**9)
    ranks = []
    for score in draw(random, "discrete", 1500):
        before = one.bets[0]
        one.observe([score])
        factor = one.bets[0] / (1 + before)  # = 1 - 0.9 u
        ranks.append(((1 - factor) / 0.9 + 1) / 2)
    assert kstest(ranks, "uniform").pvalue > 0.001
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("after", "within"),
    [
        (lambda random, n: random.beta(2, 1, n), 400),  # lower scores
        (lambda random, n: np.full(n, 0.999), 200),  # suspiciously high scores
        (lambda random, n: np.where(random.random(n) < 0.5, 0.3, 0.9999), 400),  # both ends
        (lambda random, n: np.full(n, math.nan), 200),
    ],
)
def test_drift_is_noticed_also_after_a_long_quiet_time(after: object, within: int) -> None:
    random = np.random.default_rng(2)
    one = monitor(draw(random, "continuous", 500), 100_000)
    one.observe(draw(random, "continuous", 2000))
    assert one.to_json()["alarm"] is False
    one.observe(after(random, within))  # type: ignore[operator]
    state = one.to_json()
    assert state["alarm"] is True
    assert state["first_alarm"] > 2000
    assert state["statistic"] >= one.level
    one.observe(after(random, within))  # type: ignore[operator]
    assert one.to_json() == state | {"images": state["images"] + within}, "until the reset"


def test_a_histogram_that_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(BadInput, match="one count more than edges"):
        DriftMonitor([0.1, 0.2], [1, 2])


def test_the_state_is_bounded() -> None:
    one = monitor(np.random.default_rng(0).random(5000), 1000)
    assert len(one.counts) <= 64
    one.observe(np.random.default_rng(1).random(500))
    assert one.counts.sum() == 5500


def test_processes_share_an_alarm_and_its_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "PROCESSES", "FOLDER_OF_THIS_TEST")  # no files of prometheus
    monkeypatch.setenv("FOLDER_OF_THIS_TEST", str(tmp_path))
    scores = draw(np.random.default_rng(0), "continuous", 500)
    one, two = (Metrics(monitor(scores, 1000), 0.1) for _ in range(2))
    low: Any = SimpleNamespace(accepted=np.zeros(200, bool), scores=np.full((200, 1), -1.0))
    assert (one.count_result(low), one.count_result(low)) == (True, False), "one line"
    assert two.drift()["alarm"] is True
    assert two.drift()["images"] == 0
    assert two.reset_drift()["alarm"] is False
    assert one.drift()["alarm"] is False
    assert one.drift()["images"] == 0
    assert one.count_result(low) is True
    assert two.drift()["alarm"] is True
