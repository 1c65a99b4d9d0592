"""Rejectors fitted to features: Gaussians, virtual logits, kernel density, nearest neighbours.

Those of density and distance (KD, LID, KNN) compare the last feature with a bank of features of
correctly classified images.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from demur.data import CIFAR10, CIFAR100, Dataset
from demur.errors import BadInput
from demur.output import Output, label_entry, prediction
from demur.rejectors.certainty import energy
from demur.rejectors.output_scores import Con
from demur.rejectors.rule import (
    FeatureRejector,
    Rejector,
    TooFewImages,
    correct_features,
    first_per_class,
    squared_distances,
)
from demur.spec.field_types import NonNegative, Positive, PositiveInt

Inverse = Literal["ridge", "pseudo", "reference"]
REFERENCE_RIDGE = 1e-10  # of the reference code, on the scatter: N times the covariance
ZERO_EIGENVALUE = 1e-10  # times the mean variance; a pseudo-inverse treats smaller ones as 0


@dataclass(frozen=True)
class Gaussian(FeatureRejector):
    """Options for the inversion of a covariance, shared by GDA, GDAStar and GMM."""

    # reference code: REFERENCE_RIDGE in fp32, whose inverse is noise for 100 classes
    inverse: Inverse = "ridge"
    ridge: NonNegative = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inverse == "ridge" and self.ridge == 0:
            raise BadInput("with ridge=0 a covariance may have no inverse; use inverse=pseudo")

    def whitening(self, centred: Tensor, mean_variance: Tensor) -> tuple[Tensor, Tensor]:
        """W (D, D) with W W^T the inverse covariance, and the log-determinant of the covariance.

        `centred` are features minus their means (N, D). The ridge is relative to `mean_variance`,
        the mean over all classes, so that a class with little variance has the same ridge as the
        others.
        """
        values, vectors = torch.linalg.eigh(centred.t() @ centred / len(centred))
        values = values.clamp_min(0)
        if self.inverse != "pseudo":
            own = self.inverse == "ridge"
            ridge = self.ridge * mean_variance if own else REFERENCE_RIDGE / len(centred)
            values = values + ridge
            return vectors / values.sqrt(), values.log().sum()
        nonzero = values > ZERO_EIGENVALUE * mean_variance
        inverse_roots = torch.where(nonzero, values, torch.inf).rsqrt()
        return vectors * inverse_roots, torch.where(nonzero, values, 1).log().sum()


@dataclass(frozen=True)
class GDA(Gaussian):
    """Minus the squared Mahalanobis distance to the nearest class mean, with one covariance.

        score = -min_c (z - mu_c)^T S^-1 (z - mu_c)

    Args:
        inverse: "ridge" adds a multiple of the identity to S; "pseudo" takes the pseudo-inverse.
            "reference" adds 1e-10 / N.
        ridge: The multiple, relative to the mean variance.

    Example:
        >>> import torch
        >>> from demur import GDA, Output
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = GDA().fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    arrays = ("means", "centre", "whitening")  # whitened minus `centre`: C, D; D; D, D

    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        z, labels = correct_features(out, y)
        means, centred, mean_variance = _centre_by_class(z.double(), labels)
        whitening, _ = self.whitening(centred, mean_variance)
        means, whitening = means.to(z.dtype), whitening.to(z.dtype)
        centre = means.mean(0)
        return (means - centre) @ whitening, centre, whitening

    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        means, centre, whitening = arrays
        z = (out.feature - centre) @ whitening
        return torch.stack([-((z - mean) ** 2).sum(1) for mean in means]).amax(0)


@dataclass(frozen=True)
class ByClass(Gaussian):
    """A Gaussian for each class; `log_det` subtracts the log-determinant of its covariance."""

    nearest: ClassVar[bool]  # the distance is to the nearest class, not to the predicted one
    log_det: bool = False  # reference code: distances alone

    arrays = ("means", "whitenings", "log_dets")  # C, D; C, D, D; C, zeros without log_det

    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        """Fit a mean and a covariance to each class; TooFewImages if one has a single image."""
        z, labels = correct_features(out, y)
        means, centred, mean_variance = _centre_by_class(z.double(), labels)
        fitted = []
        for label in range(len(means)):
            members = centred[labels == label]
            if len(members) < 2:
                raise TooFewImages(
                    f"class {label} has one image to fit a covariance to; give more images"
                )
            fitted.append(self.whitening(members, mean_variance))
        whitenings = torch.stack([whitening for whitening, _ in fitted])
        log_dets = torch.stack([log_det for _, log_det in fitted]) * float(self.log_det)
        return tuple(part.to(z.dtype) for part in (means, whitenings, log_dets))

    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        by_class = [
            -(((out.feature - mean) @ whitening) ** 2).sum(1) - log_det
            for mean, whitening, log_det in zip(*arrays, strict=True)
        ]
        scores = torch.stack(by_class, 1)  # N, C
        return scores.amax(1) if self.nearest else label_entry(scores, prediction(out))


@dataclass(frozen=True)
class GDAStar(ByClass):
    """Minus the squared Mahalanobis distance to the nearest class, with one covariance per class.

        score = -min_c (z - mu_c)^T S_c^-1 (z - mu_c)

    `inverse` and `ridge` are those of `GDA`; `log_det` subtracts log det S_c.

    Example:
        >>> import torch
        >>> from demur import GDAStar, Output
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = GDAStar().fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    display_name: ClassVar[str] = "GDA*"
    nearest = True


@dataclass(frozen=True)
class GMM(ByClass):
    """Minus the squared Mahalanobis distance to the predicted class, by its own covariance.

        score = -(z - mu_k)^T S_k^-1 (z - mu_k),    k = argmax_c logit_c

    The name is the paper's. It is one Gaussian per class, not a mixture.

    `inverse` and `ridge` are those of `GDA`; `log_det` subtracts log det S_k.

    Example:
        >>> import torch
        >>> from demur import GMM, Output
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = GMM().fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    nearest = False


def _centre_by_class(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Class means (C, D), features minus their class mean (N, D), and their mean variance."""
    members = one_hot(labels).to(z.dtype)  # N, C
    means = members.t() @ z / members.sum(0)[:, None]
    centred = z - means[labels]
    mean_variance = (centred**2).mean()
    if mean_variance == 0:
        raise TooFewImages(
            "the features of each class are all equal and have no variance; give other images"
        )
    return means, centred, mean_variance


@dataclass(frozen=True)
class ViM(FeatureRejector):
    """Energy minus a virtual logit, the scaled norm of the feature outside its principal space.

        score = logsumexp(logits) - alpha * ||R^T (z - o)||

    R spans the complement of the principal space, o is the origin where the linear classifier's
    logits vanish, and alpha scales the mean norm to the mean of the largest logits.

    Args:
        principal: Dimensions of the principal space; None takes half of the feature's.

    Raises:
        BadInput: In `fit`, if `principal` is not below the feature's dimensions.

    Example:
        >>> import torch
        >>> from demur import Output, ViM
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = ViM(principal=4).fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    arrays = ("origin", "residual")  # D; D, D - principal, scaled by alpha
    principal: PositiveInt | None = None

    def fit_arrays(self, out: Output, y: Tensor) -> tuple[Tensor, ...]:
        correct_features(out, y)  # raises for outputs that no rejector can be fitted to
        # on the CPU, where least squares also solve rank-deficient problems
        z, logits = (part.detach().double().cpu() for part in (out.feature, out.logits))
        dim = z.shape[1]
        principal = dim // 2 if self.principal is None else self.principal
        if principal >= dim:
            raise BadInput(
                f"principal={principal} of {dim} dimensions leaves no residual; use less"
            )
        # the feature at which all logits are 0, of the linear layer that least squares recover
        with_bias = torch.cat([z, z.new_ones(len(z), 1)], 1)
        layer = torch.linalg.lstsq(with_bias, logits, driver="gelsd").solution  # D + 1, C
        origin = -torch.linalg.pinv(layer[:-1].t()) @ layer[-1]
        moments = (z - origin).t() @ (z - origin) / len(z)
        residual = torch.linalg.eigh(moments).eigenvectors[:, : dim - principal]  # ascending order
        norms = ((z - origin) @ residual).norm(dim=1)
        alpha = logits.amax(1).mean() / norms.mean().clamp_min(torch.finfo(z.dtype).tiny)
        return origin.to(out.feature), (alpha * residual).to(out.feature)

    def score_features(self, out: Output, *arrays: Tensor) -> Tensor:
        origin, residual = arrays
        projected = (out.feature - origin) @ residual
        tiny = torch.finfo(projected.dtype).tiny  # keeps the gradient of the root finite
        return energy(out) - (projected**2).sum(1).clamp_min(tiny).sqrt()


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
