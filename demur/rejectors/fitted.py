"""Base of the fitted scores: a module with buffers, and the features that it is fitted to.

score = KD(sigma=1e-3).fit(out, y)
score.to("cuda")(model(x))

Scores of more than CHUNK images are computed in chunks, which bounds the memory.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Self, cast

import torch
from torch import Tensor, nn

from demur.errors import BadInput
from demur.numerics import no_autocast
from demur.output import Output, as_output, prediction
from demur.rejectors.rule import Score

CHUNK = 1024  # images per chunk


class TooFewImages(BadInput):
    """Too few images, or images of too few classes, to fit a score."""


class FittedScore(nn.Module, Score):
    """A fitted score as a module, so that `to(device)` moves its buffers."""

    dtype: torch.dtype  # of the buffers and of the computation

    def __call__(self, out: Output) -> Tensor:
        return cast(Tensor, super().__call__(out))

    def forward(self, out: Output) -> Tensor:
        """Score of each image, N; raises BadInput for an output without features."""
        check_features(out)
        out = as_output(out)
        out = out._replace(feature=out.feature.to(self.dtype))
        with no_autocast(out.logits.device):  # rounding in 16 bits would exceed the distances
            if len(out.logits) <= CHUNK:
                return self.score_chunk(out)
            rows = torch.arange(len(out.logits), device=out.logits.device)
            return torch.cat([self.score_chunk(out.select(chunk)) for chunk in rows.split(CHUNK)])

    @abstractmethod
    def score_chunk(self, out: Output) -> Tensor:
        """Score of each image of a chunk, N, without autocast."""

    def set_buffers(self, **tensors: Tensor) -> None:
        """Register tensors as buffers by name; floating-point ones set `dtype`."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
            if tensor.is_floating_point():
                self.dtype = tensor.dtype

    @classmethod
    def restored(cls, arrays: Mapping[str, Tensor], **settings: float | bool) -> Self:
        """Return a score with these buffers and settings; BadInput for buffers of another one."""
        names = [name for name, kind in cls.__annotations__.items() if kind is Tensor]
        if set(arrays) != set(names):
            raise BadInput(f"{cls.__name__} has the arrays {', '.join(names)}, and no others")
        score = cls.__new__(cls)
        nn.Module.__init__(score)
        for name, value in settings.items():
            setattr(score, name, value)
        score.set_buffers(**arrays)
        return score


def check_features(out: Output) -> None:
    """Raise BadInput if the output has no features."""
    if out.feature.shape[-1] == 0:
        raise BadInput(
            "this rejector needs features; return Output(logits, features, aux) from the model, or "
            "keep them with demur attack --keep-features"
        )


def correct_features(out: Output, y: Tensor) -> tuple[Tensor, Tensor]:
    """Features (M, D) and labels (M) of the correctly classified images, in order.

    A class without a correct prediction contributes all its images.

    Raises:
        TooFewImages: If a class has no image.
        BadInput: If the output has no features.
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
