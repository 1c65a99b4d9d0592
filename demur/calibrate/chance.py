"""Whether a classifier is above chance and above its largest class: an exact binomial test."""

from typing import Any, NamedTuple

import numpy as np

from demur.calibrate.binomial import binomial_sf
from demur.metrics.checks import IntArray

LEVEL = 0.05  # of the one-sided test
REMEDY = (
    "check the labels, add images, train longer (epochs=60) or with a smaller eps; "
    "images-standard-small shows what the net learns without attacks"
)


class ChanceTest(NamedTuple):
    """Correct predictions of clean images, beside chance and the largest class among them."""

    right: int
    images: int
    classes: int
    majority: int  # images of the largest class
    split: str

    @staticmethod
    def of(right: int, y: IntArray, classes: int, split: str) -> "ChanceTest":
        """Test of `right` correct predictions for images with the labels `y`."""
        return ChanceTest(right, len(y), classes, int(np.bincount(y).max()), split)

    @property
    def passed(self) -> bool:
        """Whether so many correct predictions are improbable at either baseline."""
        baseline = max(1 / self.classes, self.majority / self.images)
        return bool(binomial_sf(self.right, self.images, baseline) <= LEVEL)

    @property
    def sentence(self) -> str:
        """Accuracy beside both baselines; what to try if it is not above them."""
        above = "above" if self.passed else "not shown to be better than"
        return (
            f"{100 * self.right / self.images:.1f}% of {self.images} {self.split} images are "
            f"right, {above} chance ({100 / self.classes:.1f}%) and the largest class "
            f"({100 * self.majority / self.images:.1f}%){'' if self.passed else f'; {REMEDY}'}"
        )

    def to_json(self) -> dict[str, Any]:
        """What a guard stores."""
        return {**self._asdict(), "passed": self.passed, "sentence": self.sentence}
