"""When nothing can be certified: how near it came and what would be needed.

try:
    found = certify(score, correct, Risk(0.05))
except Uncertified as refusal:
    refusal.shortfall.needed      # about so many images, or None if more would not help
"""

import math
from dataclasses import dataclass

from demur.calibrate.guarantee import Guarantee, percent
from demur.errors import BadInput

MOST_TRIALS = 10**7


@dataclass(frozen=True)
class Shortfall:
    """What the thresholds that the pilot thought most promising showed on the test images."""

    guarantee: Guarantee
    confidence: float
    thresholds: tuple[float, ...]
    images: int  # pilot and test
    hits: int
    trials: int
    error: float  # with which they were tested

    @property
    def possible(self) -> float:
        """The level that can be promised at these thresholds now, rounded to the safe side."""
        bound = 10_000 * self.guarantee.bound(self.hits, self.trials, self.error)
        return (math.ceil(bound) if self.guarantee.is_upper_bound else math.floor(bound)) / 10_000

    @property
    def needed(self) -> int | None:
        """About how many images would do if the rate stayed as it is; None: no sensible number."""
        if self.trials == 0:
            return None
        enough = self.trials
        while not self._passes(enough):
            enough *= 2
            if enough > MOST_TRIALS:
                return None
        short = enough // 2
        while enough - short > 1 + enough // 100:
            middle = (short + enough) // 2
            short, enough = (short, middle) if self._passes(middle) else (middle, enough)
        return _rounded_up(self.images * enough / self.trials)

    @property
    def sentence(self) -> str:
        """The whole story, for a user."""
        sure, needed = percent(self.confidence), self.needed
        start = f"no threshold gives {self.guarantee.statement} with {sure} confidence"
        if self.trials == 0:
            return f"{start}: {self.images:,} images are too few to test any; give more"
        seen = f"{self.guarantee.broadcast(self.hits, self.trials)} ({percent(self.hits / self.trials)})"
        way_out = (
            "more images would not help at that rate, but a better score might"
            if needed is None
            else f"give about {needed:,} images instead of {self.images:,}"
        )
        if 0 < self.possible < 1:
            bound = "at most" if self.guarantee.is_upper_bound else "at least"
            way_out += f", or promise {bound} {percent(self.possible)}"
        return f"{start}: the most promising had {seen}; {way_out}"

    def _passes(self, trials: int) -> bool:
        """Whether so many trials at the observed rate would keep the promise."""
        expected = self.hits * trials / self.trials
        hits = math.ceil(expected) if self.guarantee.is_upper_bound else math.floor(expected)
        return bool(self.guarantee.p_value(hits, trials) <= self.error)


def _rounded_up(number: float) -> int:
    """The next number of two digits and zeros."""
    unit: int = 10 ** max(0, len(str(math.ceil(number))) - 2)
    return math.ceil(number / unit) * unit


class Uncertified(BadInput):
    """No thresholds keep the promise with the confidence asked for."""

    def __init__(self, shortfall: Shortfall) -> None:
        super().__init__(shortfall)
        self.shortfall = shortfall

    def __str__(self) -> str:
        return self.shortfall.sentence
