"""Scores, the rejectors that fit them, and rules that accept by thresholds.

A Score is a differentiable function of an Output, so that attacks can target it. A FittedScore is a
module with buffers; more than CHUNK images are scored in chunks, which bounds the memory.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demur.errors import BadInput
from demur.numerics import no_autocast, raise_if_invalid
from demur.output import AuxColumn, Output, as_output, prediction
from demur.spec import Spec, required_fields

CHUNK = 1024  # images per chunk


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
        """Return the score of each image, N."""

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
        """Return the score fitted to clean images of the fit split, with the labels y (N)."""

    def restore(self, arrays: Mapping[str, Tensor]) -> Score:
        """Return a fitted score from its saved buffers; those of another raise BadInput."""
        raise BadInput(f"{type(self).__name__} cannot be restored; give it a method `restore`")

    @classmethod
    def baselines(cls, data: object) -> dict[str, "Rejector"]:
        """Return the rejectors of this class that every net is scored with, by name.

        By default one with the settings of the class. A rejector that needs a head's auxiliary
        output or a value for a field is none; a head names its own rejectors. Settings may depend
        on the data set.
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

    def accept_margins(self, out: Output, label: Tensor) -> Tensor:
        """Margin of each score if the net predicted `label`, N, number of scores."""
        return torch.stack([score.accept_margin(out, t, label) for score, t in self.pairs], 1)

    def accepted(self, out: Output) -> Tensor:
        """Whether each image is accepted, N; raises BadInput for a score of NaN."""
        scores = [score(out) for score, _ in self.pairs]
        for values in scores:
            raise_if_invalid(
                "score", values, "a score must be a number; use -inf to reject an image"
            )
        pairs = zip(scores, self.pairs, strict=True)
        return torch.stack([values >= t for values, (_, t) in pairs]).all(0)  # N


class TooFewImages(BadInput):
    """Too few images, or images of too few classes, to fit a score."""


class FittedScore(nn.Module, Score):
    """A fitted score as a module, so that `to(device)` moves its buffers."""

    dtype: torch.dtype  # of the buffers and of the computation
    reads_features = True

    def __call__(self, out: Output) -> Tensor:
        return cast(Tensor, super().__call__(out))

    def forward(self, out: Output) -> Tensor:
        """Score of each image, N; raises BadInput for an output without features."""
        return self.in_chunks(self.score_chunk, out)

    def in_chunks(self, score: Callable[[Output], Tensor], out: Output) -> Tensor:
        """Return a score of each image, N, in the dtype of the buffers."""
        out = as_output(out)
        if self.reads_features:
            check_features(out)
        out = Output(out.logits, out.feature.to(self.dtype), out.aux)
        with no_autocast(out.logits.device):  # rounding in 16 bits would exceed the distances
            if len(out.logits) <= CHUNK:
                return score(out)
            rows = torch.arange(len(out.logits), device=out.logits.device)
            return torch.cat([score(out.select(chunk)) for chunk in rows.split(CHUNK)])

    @abstractmethod
    def score_chunk(self, out: Output) -> Tensor:
        """Score of each image of a chunk, N, without autocast."""

    def set_buffers(self, **tensors: Tensor) -> None:
        """Register tensors as buffers by name; floating-point ones set `dtype`."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
            if tensor.is_floating_point():
                self.dtype = tensor.dtype


@dataclass(frozen=True)
class FeatureRejector(Rejector, ABC):
    """A rejector fitted to features: arrays of clean images, and a score that reads them."""

    arrays: ClassVar[tuple[str, ...]]  # their names in a saved guard
    reads_features: ClassVar[bool] = True

    @abstractmethod
    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        """Return the arrays in the order of their names; arguments as in `fit`."""

    @abstractmethod
    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        """Return the score of each image, N, from the arrays."""

    def log_score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        """Return the form of the score for an attack's objective, N."""
        return self.score_features(out, *arrays)

    def fit(self, out: Output, y: Tensor) -> "FeatureScore":
        return FeatureScore(self, *self.fit_arrays(out, y))

    def restore(self, arrays: Mapping[str, Tensor]) -> "FeatureScore":
        if set(arrays) != set(self.arrays):
            names = ", ".join(self.arrays)
            raise BadInput(f"{type(self).__name__} has the arrays {names}, and no others")
        return FeatureScore(self, *(arrays[name] for name in self.arrays))


class FeatureScore(FittedScore):
    """The score of a `FeatureRejector` with its arrays as buffers."""

    def __init__(self, rejector: FeatureRejector, *arrays: Tensor) -> None:
        super().__init__()
        self.rejector, self.reads_features = rejector, rejector.reads_features
        self.set_buffers(**dict(zip(rejector.arrays, arrays, strict=True)))

    def score_chunk(self, out: Output) -> Tensor:
        return self.rejector.score_features(out, *self.buffers())

    def log_score(self, out: Output) -> Tensor:
        return self.in_chunks(
            lambda part: self.rejector.log_score_features(part, *self.buffers()), out
        )


def check_features(out: Output) -> None:
    """Raise BadInput if the output has no features."""
    if out.feature.shape[-1] == 0:
        raise BadInput(
            "this rejector needs features; return Output(logits, features, aux) from the model, or "
            "keep them with demur attack --keep-features"
        )


def correct_features(out: Output, y: Tensor) -> tuple[Tensor, Tensor]:
    """Features (M, D) and labels (M) of the correctly classified images, in order.

    A class without a correct prediction contributes all its images; one without an image raises
    TooFewImages.
    """
    check_features(out)
    chosen = prediction(out) == y
    classes = out.logits.shape[-1]
    images, correct = (torch.bincount(labels, minlength=classes) for labels in (y, y[chosen]))
    if (images == 0).any():
        missing = int((images == 0).nonzero()[0, 0])
        raise TooFewImages(f"class {missing} has no image to fit to; give images of every class")
    chosen |= (correct == 0)[y]
    return out.feature[chosen].detach(), y[chosen]


def first_per_class(y: Tensor, count: int) -> Tensor:
    """Mask (N) of the first `count` images of each class."""
    same = y[:, None] == torch.arange(int(y.max()) + 1, device=y.device)  # N, C
    return same.cumsum(0).gather(1, y[:, None])[:, 0] <= count


def squared_distances(z: Tensor, bank: Tensor) -> Tensor:
    """Squared distances (N, M) between features; both centred by the bank's mean beforehand."""
    products = z @ bank.t()
    return ((z * z).sum(1)[:, None] + (bank * bank).sum(1) - 2 * products).clamp_min(0)  # N, M
