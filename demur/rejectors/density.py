"""Trust what lies where right answers lie: kernel density, local dimension, nearest neighbours.

KD(sigma=1e-3)      # Feinman et al. 2017, with the kernel of the reference code
LID(k=600)          # Ma et al. 2018, on one layer and a fixed bank
KNN(k=50)           # Sun et al. 2022

All compare the last feature with a bank of features that the net classifies rightly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from demur.errors import BadInput
from demur.field_types import Positive, PositiveInt
from demur.output import Output, prediction
from demur.precision import no_autocast
from demur.rejectors.fitted import (
    FittedScore,
    TooFewImages,
    correct_features,
    first_per_class,
    squared_distances,
)
from demur.rule import Rejector
from demur.spec import Spec

LEAST_GAP = 1e-6  # between log distances: below it a dimension has no estimate


@dataclass(frozen=True)
class KD(Spec, Rejector):
    """The mean of exp(-sigma d^2) over the predicted class's bank, as a log."""

    # paper: prints exp(-d^2 / sigma^2), which underflows to 0 at its sigma of 1e-3
    sigma: Positive = 1e-3
    per_class: PositiveInt = 1000

    def fit(self, out: Output, y: Tensor) -> "KernelDensity":
        """The score that compares with the first right answers of each class."""
        features, labels = correct_features(out, y)
        kept = first_per_class(labels, self.per_class)
        return KernelDensity(self.sigma, features[kept], labels[kept])


class KernelDensity(FittedScore):
    """Log of the mean kernel; the reference code's mean itself would tie where it underflows."""

    centre: Tensor
    bank: Tensor
    labels: Tensor
    log_counts: Tensor

    def __init__(self, sigma: float, bank: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.sigma = sigma
        centre = bank.mean(0)
        counts = torch.bincount(labels).to(bank.dtype)
        self.hold(centre=centre, bank=bank - centre, labels=labels, log_counts=counts.log())

    def scored(self, out: Output) -> Tensor:
        """The log density of the predicted class."""
        label = prediction(out)
        kernel = -self.sigma * squared_distances(out.feature - self.centre, self.bank)
        others = label[:, None] != self.labels
        return kernel.masked_fill(others, -torch.inf).logsumexp(1) - self.log_counts[label]


@dataclass(frozen=True)
class LID(Spec, Rejector):
    """Minus the local intrinsic dimension among k neighbours of a bank."""

    k: PositiveInt = 600
    size: PositiveInt = 10_000

    def fit(self, out: Output, y: Tensor) -> "LocalDimension":
        """The score that compares with the first right answers of all classes."""
        return LocalDimension(self.k, _bank(out, y, self.size, self.k, f"LID(k={self.k})"))


class LocalDimension(FittedScore):
    """1 / (mean log r_i - log r_k) over the k nearest of the bank."""

    centre: Tensor
    bank: Tensor

    def __init__(self, k: int, bank: Tensor) -> None:
        super().__init__()
        self.k = k
        centre = bank.mean(0)
        self.hold(centre=centre, bank=bank - centre)

    def scored(self, out: Output) -> Tensor:
        """Minus the dimension."""
        near = nearest(squared_distances(out.feature - self.centre, self.bank), self.k)
        tiny = torch.finfo(near.dtype).eps ** 2  # of an image that is in the bank itself
        logs = near.clamp_min(tiny).log() / 2  # N, k
        return -1 / (logs.amax(1) - logs.mean(1)).clamp_min(LEAST_GAP)


@dataclass(frozen=True)
class KNN(Spec, Rejector):
    """Minus the distance to the k-th neighbour among features scaled to length 1."""

    k: PositiveInt = 50
    size: PositiveInt = 10_000

    def fit(self, out: Output, y: Tensor) -> "Neighbours":
        """The score that compares with the first right answers of all classes."""
        return Neighbours(self.k, _bank(out, y, self.size, self.k, f"KNN(k={self.k})"))


class Neighbours(FittedScore):
    """Minus the distance to the k-th neighbour."""

    bank: Tensor

    def __init__(self, k: int, bank: Tensor) -> None:
        super().__init__()
        self.k = k
        self.hold(bank=normalize(bank))

    def scored(self, out: Output) -> Tensor:
        """Minus the k-th smallest distance."""
        return -self._distances(out).amax(1)

    def log_score(self, out: Output) -> Tensor:
        """Minus the mean distance to all k, since who is the k-th changes with every step."""
        with no_autocast(out.logits.device):
            return -self._distances(out._replace(feature=out.feature.to(self.kind))).mean(1)

    def _distances(self, out: Output) -> Tensor:
        squared = squared_distances(normalize(out.feature), self.bank)
        tiny = torch.finfo(squared.dtype).eps ** 2  # keeps the gradient of the root finite
        return nearest(squared, self.k).clamp_min(tiny).sqrt()  # N, k


def nearest(distances: Tensor, k: int) -> Tensor:
    """The k smallest of each row, in any order."""
    return distances.topk(k, dim=1, largest=False, sorted=False).values


def _bank(out: Output, y: Tensor, size: int, k: int, who: str) -> Tensor:
    bank = correct_features(out, y)[0][:size]
    if size <= k:
        raise BadInput(f"{who} needs a bank of more than {k} features; its size is {size}")
    if len(bank) <= k:
        raise TooFewImages(
            f"{who} needs more than {k} right answers to learn from, not {len(bank)}"
        )
    return bank
