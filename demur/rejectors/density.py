"""Density rejectors: kernel density, local intrinsic dimension and nearest neighbours.

Each compares the last feature with a bank of features of correctly classified images.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from demur.data import CIFAR10, CIFAR100, Dataset
from demur.errors import BadInput
from demur.output import Output, prediction
from demur.rejectors.covariance import GDA, GMM, GDAStar
from demur.rejectors.output_scores import Con
from demur.rejectors.rule import (
    FeatureRejector,
    Rejector,
    TooFewImages,
    correct_features,
    first_per_class,
    squared_distances,
)
from demur.spec.field_types import Positive, PositiveInt

MIN_LOG_GAP = 1e-6  # between log distances; a smaller gap gives no estimate of the dimension


@dataclass(frozen=True)
class KD(FeatureRejector):
    """Log kernel density of the feature among the predicted class.

        score = log mean_i exp(-sigma * ||z - z_i||^2)

    The z_i are features of correctly classified images of the predicted class.

    Args:
        sigma: Inverse squared width of the kernel.
        per_class: Largest number of features per class; the first ones are used.

    Example:
        >>> import torch
        >>> from demur import KD, Output
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = KD(sigma=0.01).fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    arrays = ("centre", "bank", "labels", "log_counts")  # D; M, D; M; C
    # paper: prints exp(-d^2 / sigma^2), which underflows to 0 at its sigma of 1e-3
    sigma: Positive = 1e-3
    per_class: PositiveInt = 1000

    @classmethod
    def baselines(cls, data: object) -> dict[str, Rejector]:
        if isinstance(data, CIFAR100):  # paper: sigma is 1 here; reference code: 1e-2
            return {"KD": KD(1.0, 100), "KD, sigma 0.01": KD(1e-2, 100)}
        return {"KD": KD() if isinstance(data, CIFAR10) else KD(1e-2, 100)}

    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        features, labels = correct_features(out, y)
        chosen = first_per_class(labels, self.per_class)
        bank, labels = features[chosen], labels[chosen]
        centre = bank.mean(0)
        return centre, bank - centre, labels, torch.bincount(labels).to(bank.dtype).log()

    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        # the reference code's density without the log ties where it underflows
        centre, bank, labels, log_counts = arrays
        label = prediction(out)
        log_kernel = -self.sigma * squared_distances(out.feature - centre, bank)
        other_class = label[:, None] != labels
        return log_kernel.masked_fill(other_class, -torch.inf).logsumexp(1) - log_counts[label]


@dataclass(frozen=True)
class LID(FeatureRejector):
    """Minus the local intrinsic dimension among the k nearest features of a bank.

        score = 1 / mean_i log(r_i / r_k)

    r_1 <= ... <= r_k are the distances to the k nearest features.

    Args:
        k: Number of neighbours.
        size: Size of the bank, the first correctly classified images.

    Example:
        >>> import torch
        >>> from demur import LID, Output
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = LID(k=10).fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    arrays = ("centre", "bank")  # D; M, D
    k: PositiveInt = 600
    size: PositiveInt = 10_000

    @classmethod
    def baselines(cls, data: object) -> dict[str, Rejector]:
        return {"LID": LID() if isinstance(data, CIFAR10) else LID(20)}

    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        bank = _bank(out, y, self.size, self.k, f"LID(k={self.k})")
        centre = bank.mean(0)
        return centre, bank - centre

    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        centre, bank = arrays
        near = k_smallest(squared_distances(out.feature - centre, bank), self.k)
        tiny = torch.finfo(near.dtype).eps ** 2  # an image of the bank has distance 0 to itself
        logs = near.clamp_min(tiny).log() / 2  # N, k
        return -1 / (logs.amax(1) - logs.mean(1)).clamp_min(MIN_LOG_GAP)


@dataclass(frozen=True)
class KNN(FeatureRejector):
    """Minus the distance to the k-th nearest feature of a bank, all scaled to length 1.

        score = -||z / ||z|| - z_(k)||

    Args:
        k: Number of neighbours.
        size: Size of the bank, the first correctly classified images.

    Example:
        >>> import torch
        >>> from demur import KNN, Output
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = KNN(k=10).fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    arrays = ("bank",)  # M, D
    k: PositiveInt = 50
    size: PositiveInt = 10_000

    @classmethod
    def baselines(cls, data: object) -> dict[str, Rejector]:
        return {"kNN": KNN() if isinstance(data, CIFAR10 | CIFAR100) else KNN(10)}

    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        return (normalize(_bank(out, y, self.size, self.k, f"KNN(k={self.k})")),)

    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        return -self._distances(out, *arrays).amax(1)

    def log_score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        # the mean over all k neighbours is smoother: the k-th one changes with every attack step
        return -self._distances(out, *arrays).mean(1)

    def _distances(self, out: Output, bank: Tensor) -> Tensor:
        squared = squared_distances(normalize(out.feature), bank)
        tiny = torch.finfo(squared.dtype).eps ** 2  # keeps the gradient of the root finite
        return k_smallest(squared, self.k).clamp_min(tiny).sqrt()  # N, k


def k_smallest(distances: Tensor, k: int) -> Tensor:
    """The k smallest entries of each row (N, k), unsorted."""
    return distances.topk(k, dim=1, largest=False, sorted=False).values


def _bank(out: Output, y: Tensor, size: int, k: int, rejector: str) -> Tensor:
    """The first `size` features of correctly classified images; BadInput if `k` or fewer."""
    bank = correct_features(out, y)[0][:size]
    if size <= k:
        raise BadInput(f"{rejector} needs a bank of more than {k} features; its size is {size}")
    if len(bank) <= k:
        raise TooFewImages(
            f"{rejector} needs more than {k} correctly classified images, not {len(bank)}"
        )
    return bank


# KD with the data set's bank size, the values of sigma, and the values of LID's k
_GRID: dict[type[Dataset], tuple[KD, tuple[float, ...], tuple[int, ...]]] = {
    CIFAR10: (KD(), (1e-1, 1e-2, 1e-3), (*range(100, 900, 100), 1000, 2000)),
    CIFAR100: (
        KD(per_class=100), (10.0, 1.0, 1e-1, 1e-2, 1e-3),
        (10, 20, 40, 60, 80, *range(100, 600, 100)),
    ),
}  # fmt: skip
_GRID_FEW_IMAGES = (KD(per_class=100), (1.0, 1e-1, 1e-2, 1e-3), (10, 20, 40, 60, 80, 100))


REFERENCE_RIDGE_NAME = "{}, ridge 1e-10"


def paper_grid(data: Dataset) -> dict[str, Rejector]:
    """Con, KD and LID at every setting that the paper tried on this data set, by name.

    Also GDA, GDA* and GMM with the ridge of the paper's code.
    """
    density, sigmas, ks = _GRID.get(type(data), _GRID_FEW_IMAGES)
    by_sigma = {f"KD, sigma {sigma:g}": replace(density, sigma=sigma) for sigma in sigmas}
    by_ridge = {
        REFERENCE_RIDGE_NAME.format(one.display_name or type(one).__name__): one
        for one in (GDA("reference"), GDAStar("reference"), GMM("reference"))
    }
    return {"Con": Con(), **by_sigma, **{f"LID, k {k}": LID(k) for k in ks}, **by_ridge}
