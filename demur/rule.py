"""When an answer is given: scores, the rejectors that make them, and rules with thresholds.

    rule = score.rule(0.7)
    rule.accepted(out)      # score >= 0.7
    rule.margin(out)        # score - 0.7; for coupled scores the smallest of the margins

A Score is a torch function of an Output, so whatever decides can also be attacked.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demur.output import Output


class Score(ABC):
    """How far an answer can be trusted; higher means more."""

    @abstractmethod
    def __call__(self, out: Output) -> Tensor:
        """One value per image."""

    def log_score(self, out: Output) -> Tensor:
        """The score in the form an attacker should climb: its log where that keeps gradients."""
        return self(out)

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """How far inside the accepted set the answer `label` would be, if it were given.

        For the answer that is given its sign is that of the score less t.
        """
        return self(out) - t

    def rule(self, t: float) -> "Rule":
        """Accept where the score reaches t."""
        return Rule(((self, t),))


class Rejector(ABC):
    """A frozen spec that learns its Score from clean outputs of the fit split."""

    @abstractmethod
    def fit(self, out: Output, y: Tensor) -> Score:
        """The fitted score."""


class OperatingPoint(ABC):
    """How a threshold is chosen from scores of clean images, of the cal split if not said."""

    split: str = "cal"

    @abstractmethod
    def threshold(self, score: NDArray[np.float64], correct: NDArray[np.bool_]) -> float:
        """The threshold; accepted is score >= threshold."""


def as_score(rejector: Rejector | Score) -> Score:
    """The rejector as a score; one that still has to be fitted is a mistake of the caller."""
    if isinstance(rejector, Score):
        return rejector
    raise TypeError(f"{rejector} is not fitted; evaluate.bind makes specs callable")


@dataclass(frozen=True)
class Rule:
    """Accept where every score reaches its threshold."""

    pairs: tuple[tuple[Score, float], ...]

    def margin(self, out: Output) -> Tensor:
        """How far each image is inside (positive) or outside the accepted set."""
        return torch.stack([score(out) - t for score, t in self.pairs]).amin(0)  # N

    def accepted(self, out: Output) -> Tensor:
        """Which images are answered."""
        return torch.stack([score(out) >= t for score, t in self.pairs]).all(0)  # N
