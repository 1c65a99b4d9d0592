"""The result of a failed certification: how close it came and what would be needed.

try:
    certificate = certify_threshold(score, correct, Risk(0.05))
except Uncertified as error:
    error.shortfall.needed      # estimated number of images, or None if more would not help
"""

import math
from dataclasses import dataclass

from demur.calibrate.guarantee import Guarantee, percent
from demur.errors import BadInput

MAX_TRIALS = 10**7


@dataclass(frozen=True)
class Shortfall:
    """Counts on the test images of the candidate that was best on the pilot images."""

    guarantee: Guarantee
    confidence: float
    thresholds: tuple[float, ...]
    images: int  # pilot and test
    hits: int
    trials: int
    error: float  # at which the candidate was tested

    @property
    def possible(self) -> float:
        """Level that can be guaranteed at these thresholds, rounded to the safe side."""
        bound = 10_000 * self.guarantee.bound(self.hits, self.trials, self.error)
        return (math.ceil(bound) if self.guarantee.is_upper_bound else math.floor(bound)) / 10_000

    @property
    def needed(self) -> int | None:
        """Estimated number of images that suffice at the observed rate; None above MAX_TRIALS."""
        if self.trials == 0:
            return None
        enough = self.trials
        while not self._passes(enough):
            enough *= 2
            if enough > MAX_TRIALS:
                return None
        too_few = enough // 2
        while enough - too_few > 1 + enough // 100:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if self._passes(middle) else (middle, enough)
        return _round_up(self.images * enough / self.trials)

    @property
    def sentence(self) -> str:
        """What failed and what to do instead, for an error message."""
        confidence, needed = percent(self.confidence), self.needed
        start = f"no threshold gives {self.guarantee.statement} with {confidence} confidence"
        if self.trials == 0:
            return f"{start}: {self.images:,} images are too few to test any; give more"
        counts = self.guarantee.describe_counts(self.hits, self.trials)
        observed = f"{counts} ({percent(self.hits / self.trials)})"
        advice = (
            "more images would not help at that rate, but a better score might"
            if needed is None
            else f"give about {needed:,} images instead of {self.images:,}"
        )
        if 0 < self.possible < 1:
            bound = "at most" if self.guarantee.is_upper_bound else "at least"
            advice += f", or ask for {bound} {percent(self.possible)}"
        return f"{start}: the best candidate had {observed}; {advice}"

    def _passes(self, trials: int) -> bool:
        """Whether the guarantee would pass its test with this many trials at the observed rate."""
        expected = self.hits * trials / self.trials
        hits = math.ceil(expected) if self.guarantee.is_upper_bound else math.floor(expected)
        return bool(self.guarantee.p_value(hits, trials) <= self.error)


def _round_up(number: float) -> int:
    """Number rounded up to two significant digits."""
    unit: int = 10 ** max(0, len(str(math.ceil(number))) - 2)
    return math.ceil(number / unit) * unit


class Uncertified(BadInput):
    """No thresholds give the guarantee with the required confidence.

    Args:
        shortfall: What is missing; its `sentence` is the message.

    Example:
        >>> import numpy as np
        >>> from demur import Risk, Uncertified, certify_threshold
        >>> score, correct = np.linspace(0, 1, 20), np.arange(20) % 2 == 0
        >>> try:
        ...     certify_threshold(score, correct, Risk(0.01))
        ... except Uncertified as error:
        ...     reason = str(error)
    """

    def __init__(self, shortfall: Shortfall) -> None:
        super().__init__(shortfall)
        self.shortfall = shortfall

    def __str__(self) -> str:
        return self.shortfall.sentence
