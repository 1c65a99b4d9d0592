"""What learned scores share: a module with buffers, and the right answers it learns from.

score = KD(sigma=1e-3).fit(out, y)
score.to("cuda")(model(x))

Large sets are scored a piece at a time, so memory stays bounded whatever is asked.
"""

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from demur.errors import BadInput
from demur.output import Output, prediction
from demur.precision import no_autocast
from demur.rule import Score

PIECE = 1024  # images that are scored at once


class TooFewImages(BadInput):
    """The images are too few, or of too few classes, to learn a score from."""


class FittedScore(nn.Module, Score):
    """A score whose numbers were learned; it moves between devices like any module."""

    kind: torch.dtype  # in which it computes

    def __call__(self, out: Output) -> Tensor:
        """One value per image."""
        return cast(Tensor, super().__call__(out))

    def forward(self, out: Output) -> Tensor:
        """One value per image, a piece at a time."""
        check_features(out)
        out = out._replace(feature=out.feature.to(self.kind))
        with no_autocast(out.logits.device):  # distances in 16 bits would be noise
            if len(out.logits) <= PIECE:
                return self.scored(out)
            places = torch.arange(len(out.logits), device=out.logits.device)
            return torch.cat([self.scored(out.select(piece)) for piece in places.split(PIECE)])

    @abstractmethod
    def scored(self, out: Output) -> Tensor:
        """One value per image of a piece."""

    def hold(self, **tensors: Tensor) -> None:
        """Keep tensors as buffers."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
            if tensor.is_floating_point():
                self.kind = tensor.dtype


def check_features(out: Output) -> None:
    """Nothing; an output without features is refused."""
    if out.feature.shape[-1] == 0:
        raise BadInput("this rejector needs features; keep them with demur attack --keep-features")


def correct_features(out: Output, y: Tensor) -> tuple[Tensor, Tensor]:
    """Features and labels of what the net gets right, in order.

    A class that it never gets right is taught by all its images; one without images is refused.
    """
    check_features(out)
    chosen = prediction(out) == y
    classes = out.logits.shape[-1]
    seen, right = (torch.bincount(labels, minlength=classes) for labels in (y, y[chosen]))
    if (seen == 0).any():
        missing = int((seen == 0).nonzero()[0, 0])
        raise TooFewImages(
            f"class {missing} has no image to learn from; give images of every class"
        )
    chosen |= (right == 0)[y]
    return out.feature[chosen].detach(), y[chosen]


def first_per_class(y: Tensor, count: int) -> Tensor:
    """Which images are among the first `count` of their class."""
    same = y[:, None] == torch.arange(int(y.max()) + 1, device=y.device)  # N, C
    return same.cumsum(0).gather(1, y[:, None])[:, 0] <= count


def squared_distances(z: Tensor, bank: Tensor) -> Tensor:
    """Between each feature and each of a bank, both with the bank's mean taken off."""
    products = z @ bank.t()
    return ((z * z).sum(1)[:, None] + (bank * bank).sum(1) - 2 * products).clamp_min(0)  # N, M
