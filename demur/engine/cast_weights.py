"""The weights of a net that learns in the arithmetic of its products, all cast at once.

    casts = CastWeights(convs, torch.bfloat16)
    with casts.renewed():               # for one pass
        maps = casts[conv](active)      # as conv does, by its weight of this pass

Autocast casts weight by weight and their gradients back one by one: forty short kernels a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from demur.engine.copies import copy_tensors


class CastConv:
    """A convolution by the weight that was cast for the pass under way."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.stride, self.padding, self.weight = conv.stride, conv.padding, conv.weight.detach()

    def __call__(self, active: Tensor) -> Tensor:
        """The convolved maps."""
        return conv2d(active, self.weight, stride=self.stride, padding=self.padding)


class CastWeights(dict[nn.Conv2d, CastConv]):
    """Convolutions in one arithmetic; gradients of their weights come back in the weights' own."""

    def __init__(self, convs: list[nn.Conv2d], dtype: torch.dtype) -> None:
        super().__init__({conv: CastConv(conv) for conv in convs})
        self.dtype = dtype

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """The weights as they are now, cast for one pass."""
        weights: tuple[Tensor, ...] = tuple(conv.weight for conv in self)
        if weights[0].dtype != self.dtype:
            weights = _Together.apply(self.dtype, *weights)  # type: ignore[no-untyped-call]
        self._hold(weights)
        try:
            yield
        finally:  # a history kept beyond its pass would tie the weights to the stream it ran on
            self._hold(tuple(weight.detach() for weight in weights))

    def _hold(self, weights: tuple[Tensor, ...]) -> None:
        for cast, weight in zip(self.values(), weights, strict=True):
            cast.weight = weight


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        return _cast(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_cast(grads, ctx.dtype)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    copy_tensors(made, list(tensors))
    return tuple(made)
