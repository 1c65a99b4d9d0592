"""Scores, the rejectors that fit them, and rules that accept by thresholds.

    rule = score.rule(0.7)
    rule.accepted(out)      # score >= 0.7
    rule.margin(out)        # score - 0.7; for coupled scores the smallest of the margins

A Score is a differentiable function of an Output, so that attacks can target it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demur.errors import BadInput
from demur.nan_checks import raise_if_invalid
from demur.output import AuxColumn, Output
from demur.spec import Spec, required_fields


class Score(ABC):
    """A value per image, a differentiable function of the output; higher means accept.

    Example:
        >>> import torch
        >>> from demur import Output, Score
        >>> class LargestLogit(Score):
        ...     def __call__(self, out: Output) -> torch.Tensor:
        ...         return out.logits.amax(-1)
        >>> none = torch.zeros(1, 0)
        >>> LargestLogit().rule(0.5).accepted(Output(torch.tensor([[2.0, 0.0]]), none, none))
        tensor([True])
    """

    @abstractmethod
    def __call__(self, out: Output) -> Tensor:
        """Return the score of each image, N.

        Args:
            out: Output of the net.
        """

    def log_score(self, out: Output) -> Tensor:
        """Form of the score for an attack's objective, N: its log where that keeps gradients."""
        return self(out)

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """Signed distance of the score to the threshold `t` if the net predicted `label`, N.

        For the label that the net does predict, the sign is that of score - t.
        """
        return self(out) - t

    def rule(self, t: float) -> "Rule":
        """Rule that accepts where score >= t."""
        return Rule(((self, t),))


@dataclass(frozen=True)
class Rejector(Spec, ABC):
    """A specification of a score, which `fit` fits to clean outputs of the fit split.

    A subclass is a frozen dataclass. One that reads only the output subclasses
    `demur.rejectors.OutputScore`, which is its own score.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from demur import Con, Output, Rejector, Score
        >>> @dataclass(frozen=True)
        ... class Same(Rejector):
        ...     def fit(self, out: Output, y: torch.Tensor) -> Score:
        ...         return Con()
    """

    display_name: ClassVar[str] = ""  # in tables; the name of the class if empty
    column: ClassVar[AuxColumn | None] = None  # auxiliary output that the score reads

    @abstractmethod
    def fit(self, out: Output, y: Tensor) -> Score:
        """Return the fitted score.

        Args:
            out: Output of the net for clean images of the fit split.
            y: Their labels, N.
        """

    def restore(self, arrays: Mapping[str, Tensor]) -> Score:
        """Return a fitted score from the arrays that it was saved with.

        Args:
            arrays: The buffers of the score by name; arrays of another score raise BadInput.
        """
        raise BadInput(f"{type(self).__name__} cannot be restored; give it a method `restore`")

    @classmethod
    def baselines(cls, data: object) -> dict[str, "Rejector"]:
        """Return the rejectors of this class that every net is scored with, by name.

        By default one with the settings of the class. A rejector that needs a head's auxiliary
        output or a value for a field is none; a head names its own rejectors.

        Args:
            data: The data set, whose settings may differ.
        """
        if cls.column or required_fields(cls):
            return {}
        return {cls.display_name or cls.__name__: cls()}


class OperatingPoint(ABC):
    """How a threshold is chosen from the scores of clean images of a split, by default `cal`."""

    split: str = "cal"

    @abstractmethod
    def threshold(self, score: NDArray[np.float64], correct: NDArray[np.bool_]) -> float:
        """Threshold t of the rule score >= t, from the scores and correctness of images, N."""


class Unresolved(BadInput):
    """A rejector that is not fitted yet, or an operating point that is no threshold yet."""


def as_score(rejector: Rejector | Score) -> Score:
    """The rejector as a score; raises Unresolved if it still has to be fitted."""
    if isinstance(rejector, Score):
        return rejector
    raise Unresolved(
        f"{rejector} is not fitted; call fit(out, y) or demur.resolve_thresholds first"
    )


@dataclass(frozen=True)
class Rule:
    """Accept where every score reaches its threshold."""

    pairs: tuple[tuple[Score, float], ...]

    def __post_init__(self) -> None:
        if any(math.isnan(t) for _, t in self.pairs):
            raise BadInput("a threshold is NaN; give a number")

    def margin(self, out: Output) -> Tensor:
        """Smallest of score - threshold, N."""
        return torch.stack([score(out) - t for score, t in self.pairs]).amin(0)  # N

    def accepted(self, out: Output) -> Tensor:
        """Whether each image is accepted, N; raises BadInput for a score of NaN."""
        scores = [score(out) for score, _ in self.pairs]
        for values in scores:
            raise_if_invalid(
                "score", values, "a score must be a number; use -inf to reject an image"
            )
        pairs = zip(scores, self.pairs, strict=True)
        return torch.stack([values >= t for values, (_, t) in pairs]).all(0)  # N
