"""Rejectors fitted by the covariance of features: Gaussians per class, and virtual logits."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.errors import BadInput
from demur.output import Output, label_entry, prediction
from demur.rejectors.certainty import energy
from demur.rejectors.rule import FeatureRejector, TooFewImages, correct_features
from demur.spec.field_types import NonNegative, PositiveInt

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
            values = values + (
                self.ridge * mean_variance if own else REFERENCE_RIDGE / len(centred)
            )
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
