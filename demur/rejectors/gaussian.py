"""Trust what lies near a class by its covariance: Gaussian discriminant analysis and its kin.

GDA()                       # Lee et al. 2018 on one layer: one covariance for all classes
GDAStar(), GMM()            # one for each class: the nearest class, or the predicted one
GMM(inverse="pseudo")       # no distance counts along directions the class never moved in

A covariance is inverted in fp64 by its eigenvalues: after adding `ridge` times their mean to each
(which stays sane with fewer images than dimensions), or leaving out those that are none.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.errors import BadInput
from demur.field_types import NonNegative
from demur.output import Output, label_entry, prediction
from demur.rejectors.fitted import FittedScore, TooFewImages, correct_features
from demur.rule import Rejector
from demur.spec import Spec

Inverse = Literal["ridge", "pseudo"]
NONE = 1e-10  # of the largest eigenvalue: below that a pseudo-inverse takes one for nothing


@dataclass(frozen=True)
class Gaussian(Spec, Rejector):
    """How a covariance is inverted."""

    # reference code: 1e-10 on the scatter in fp32, whose inverse is noise for 100 classes
    inverse: Inverse = "ridge"
    ridge: NonNegative = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inverse == "ridge" and self.ridge == 0:
            raise BadInput("a ridge of 0 may have no inverse; use inverse=pseudo")

    def whitening(self, covariance: Tensor, usual: Tensor) -> tuple[Tensor, Tensor]:
        """W with W W' the inverse, and the log of the determinant that was inverted.

        `usual` is the mean variance of all classes: a class that hardly varies has the same ridge.
        """
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp_min(0)
        if self.inverse == "ridge":
            values = values + self.ridge * usual
            return vectors / values.sqrt(), values.log().sum()
        there = values > NONE * usual
        roots = torch.where(there, values, torch.inf).rsqrt()
        return vectors * roots, torch.where(there, values, 1).log().sum()


@dataclass(frozen=True)
class GDA(Gaussian):
    """Minus the squared Mahalanobis distance to the nearest class mean, one covariance for all."""

    def fit(self, out: Output, y: Tensor) -> "TiedGaussians":
        """The score of these class means."""
        z, labels = correct_features(out, y)
        means, centred, usual = _centred(z.double(), labels)
        whitening, _ = self.whitening(centred.t() @ centred / len(z), usual)
        return TiedGaussians(means.to(z.dtype), whitening.to(z.dtype))


class TiedGaussians(FittedScore):
    """Minus the smallest distance in whitened space."""

    means: Tensor  # C, D, whitened, about their own mean
    centre: Tensor
    whitening: Tensor  # D, D

    def __init__(self, means: Tensor, whitening: Tensor) -> None:
        super().__init__()
        centre = means.mean(0)
        self.hold(means=(means - centre) @ whitening, centre=centre, whitening=whitening)

    def scored(self, out: Output) -> Tensor:
        """Minus the squared distance to the nearest mean."""
        z = (out.feature - self.centre) @ self.whitening
        return torch.stack([-((z - mean) ** 2).sum(1) for mean in self.means]).amax(0)


@dataclass(frozen=True)
class ByClass(Gaussian):
    """A Gaussian for each class; `log_det` adds what its volume costs."""

    log_det: bool = False  # reference code: distances alone

    def gaussians(self, out: Output, y: Tensor, nearest: bool) -> "Gaussians":
        """The fitted Gaussians."""
        z, labels = correct_features(out, y)
        means, centred, usual = _centred(z.double(), labels)
        parts = []
        for label in range(len(means)):
            own = centred[labels == label]
            if len(own) < 2:
                raise TooFewImages(
                    f"class {label} has one image to learn a covariance from; give more"
                )
            parts.append(self.whitening(own.t() @ own / len(own), usual))
        whitenings = torch.stack([whitening for whitening, _ in parts])
        volumes = torch.stack([volume for _, volume in parts]) * float(self.log_det)
        means, whitenings, volumes = (p.to(z.dtype) for p in (means, whitenings, volumes))
        return Gaussians(means, whitenings, volumes, nearest)


@dataclass(frozen=True)
class GDAStar(ByClass):
    """Minus the squared distance to the nearest class, each by its own covariance."""

    def fit(self, out: Output, y: Tensor) -> "Gaussians":
        """The score of these Gaussians."""
        return self.gaussians(out, y, nearest=True)


@dataclass(frozen=True)
class GMM(ByClass):
    """Minus the squared distance to the predicted class by its own covariance."""

    def fit(self, out: Output, y: Tensor) -> "Gaussians":
        """The score of these Gaussians."""
        return self.gaussians(out, y, nearest=False)


class Gaussians(FittedScore):
    """A Gaussian for each class."""

    means: Tensor  # C, D
    whitenings: Tensor  # C, D, D
    volumes: Tensor  # C

    def __init__(self, means: Tensor, whitenings: Tensor, volumes: Tensor, nearest: bool) -> None:
        super().__init__()
        self.nearest = nearest
        self.hold(means=means, whitenings=whitenings, volumes=volumes)

    def scored(self, out: Output) -> Tensor:
        """Minus the distance to the nearest class, or to the predicted one."""
        each = torch.stack(
            [
                -(((out.feature - mean) @ whitening) ** 2).sum(1) - volume
                for mean, whitening, volume in zip(
                    self.means, self.whitenings, self.volumes, strict=True
                )
            ],
            dim=1,
        )  # N, C
        if self.nearest:
            return each.amax(1)
        return label_entry(each, prediction(out))


def _centred(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Class means, features without their own, and the mean variance of what is left."""
    members = one_hot(labels).to(z.dtype)  # N, C
    means = members.t() @ z / members.sum(0)[:, None]
    centred = z - means[labels]
    usual = (centred**2).mean()
    if usual == 0:
        raise TooFewImages(
            "the features of a class are all the same; there is no spread to learn from"
        )
    return means, centred, usual
