"""bf16 copies of the weights that training updates, all cast by one launch.

    casts = CastWeights(convs, torch.bfloat16)
    with casts.refreshed():             # for one forward pass
        maps = casts[conv](active)      # conv with the weight cast for this pass

Autocast casts each weight, and each weight gradient back, in a kernel of its own: forty short
kernels a step. Casting all weights together gives the same values and gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from demur.engine.copies import copy_tensors


class CastConv:
    """A convolution by the weight that was cast for the current forward pass."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.stride, self.padding, self.weight = conv.stride, conv.padding, conv.weight.detach()

    def __call__(self, active: Tensor) -> Tensor:
        """Return the convolution of maps of shape N, C, H, W."""
        return conv2d(active, self.weight, stride=self.stride, padding=self.padding)


class CastWeights(dict[nn.Conv2d, CastConv]):
    """Convolutions computed in `dtype`; the gradients of their weights keep the weights' dtype."""

    def __init__(self, convs: list[nn.Conv2d], dtype: torch.dtype) -> None:
        super().__init__({conv: CastConv(conv) for conv in convs})
        self.dtype = dtype

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Cast the current weights for one forward pass."""
        weights: tuple[Tensor, ...] = tuple(conv.weight for conv in self)
        if weights[0].dtype != self.dtype:
            weights = _CastTogether.apply(self.dtype, *weights)  # type: ignore[no-untyped-call]
        self._set_weights(weights)
        try:
            yield
        finally:  # an autograd graph kept longer would tie the weights to the stream it ran on
            self._set_weights(tuple(weight.detach() for weight in weights))

    def _set_weights(self, weights: tuple[Tensor, ...]) -> None:
        for conv, weight in zip(self.values(), weights, strict=True):
            conv.weight = weight


class _CastTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        return _cast(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_cast(grads, ctx.dtype)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    copy_tensors(copies, list(tensors))
    return tuple(copies)
