"""A sequential test for drift of the scores away from the calibration images.

    monitor = DriftMonitor(edges, counts, mean_run_length=100_000)
    monitor.observe(scores)
    monitor.alarm, monitor.statistic

Each score is ranked among the calibration scores and all scores so far. Without drift the ranks are
independent and uniform, whatever the distribution (conformal p-values, Vovk et al. 2003).
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from demur.errors import BadInput

# Bets 1 + e u and 1 + e (3 u^2 - 1) / 2 on u = 2 p - 1: positive, and 1 on average for uniform p.
SHIFTS = np.array([-0.9, -0.4, 0.4, 0.9])
SPREADS = np.array([-0.9, 0.9])


class DriftMonitor:
    """Shiryaev-Roberts statistic of bets against uniform ranks.

    R_t = (1 + R_{t-1}) b(p_t) for each bet b; the statistic is the mean over the bets. R_t - t is a
    martingale without drift, so an alarm at R_t >= c comes on average after at least c images, and
    within n images with a probability of at most n / c. The images must be exchangeable without
    drift: frames of one video are not.

    Args:
        edges: Edges of the histogram of the calibration scores; a score s is in bin i if
            edges[i - 1] <= s < edges[i].
        counts: Calibration scores in each bin.
        mean_run_length: Level c of the alarm, in images.
        seed: Seed of the random order of equal scores; None draws one.
    """

    def __init__(
        self,
        edges: Iterable[float],
        counts: Iterable[int],
        mean_run_length: int = 100_000,
        seed: int | None = None,
    ) -> None:
        self.edges = np.array(list(edges), dtype=np.float64)
        self.counts = np.array(list(counts), dtype=np.int64)
        if len(self.counts) != len(self.edges) + 1 or mean_run_length < 1:
            raise BadInput("a histogram has one count more than edges; save the guard again")
        self.level = mean_run_length
        self.random = np.random.default_rng(seed)
        self.bets = np.zeros(len(SHIFTS) + len(SPREADS))
        self.images = 0
        self.alarms = 0
        self.first_alarm: int | None = None  # number of the image

    def observe(self, scores: Iterable[float]) -> None:
        """Take in scores in the order of arrival; a score of NaN counts as the lowest."""
        for score in scores:
            self._observe_one(-math.inf if math.isnan(score) else score)

    def _observe_one(self, score: float) -> None:
        bin_ = int(np.searchsorted(self.edges, score, side="right"))
        below, total = int(self.counts[:bin_].sum()), int(self.counts.sum())
        p = (below + self.random.random() * (int(self.counts[bin_]) + 1)) / (total + 1)
        self.counts[bin_] += 1
        u = 2 * p - 1
        factors = np.concatenate([1 + SHIFTS * u, 1 + SPREADS * (3 * u * u - 1) / 2])
        self.bets = (1 + self.bets) * factors
        self.images += 1
        if self.statistic >= self.level:
            self.alarms += 1
            self.first_alarm = self.first_alarm or self.images
            self.bets = np.zeros_like(self.bets)

    @property
    def statistic(self) -> float:
        """The mean of the bets; an alarm is given at `level`."""
        return float(self.bets.mean())

    @property
    def alarm(self) -> bool:
        """Whether an alarm was given since the start."""
        return self.alarms > 0

    @property
    def statement(self) -> str:
        """The false-alarm rate in words."""
        return f"without drift, a false alarm comes on average after at least {self.level:,} images"

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "alarm": self.alarm,
            "alarms": self.alarms,
            "first_alarm": self.first_alarm,
            "statistic": self.statistic,
            "level": self.level,
            "images": self.images,
            "false_alarms": self.statement,
        }
