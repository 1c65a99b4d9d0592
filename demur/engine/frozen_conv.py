"""3x3 convolutions whose weight is held still while images are crafted.

    maps = FrozenConv(block.conv2)(active)

With stride 1 the gradient of such a convolution is one of the same shape, by the weight turned
around: the kernels that were found for the one serve the other, and none have to be found anew.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from demur.engine.copies import Compiler, compile_function
from demur.engine.fork import conv_gradients


class FrozenWeight:
    """The weight of a convolution, and where its stride is 1, its turned twin."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.own, self.stride = conv.weight.detach(), conv.stride[0]
        self.turned: Tensor | None = None
        if self.stride == 1:
            layout = torch.channels_last if self.own.is_cuda else torch.contiguous_format
            self.turned = _turned(self.own).contiguous(memory_format=layout)

    def given_back(self, by_maps: Tensor, active: Tensor) -> Tensor:
        """The gradient with respect to what the convolution saw."""
        if self.turned is not None:
            return conv2d(by_maps, self.turned, padding=1)
        return conv_gradients(by_maps, active, self.own, self.stride, (True, False))[0]


class FrozenConv:
    """A convolution that is never differentiated by its weight."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.weight = FrozenWeight(conv)

    def __call__(self, active: Tensor) -> Tensor:
        """The convolved maps."""
        maps: Tensor = _Still.apply(active, self.weight)  # type: ignore[no-untyped-call]
        return maps


class _Still(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, active: Tensor, weight: FrozenWeight) -> Tensor:
        ctx.save_for_backward(active)
        ctx.weight = weight
        return conv2d(active, weight.own, stride=weight.stride, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (active,) = ctx.saved_tensors
        return ctx.weight.given_back(grads[0], active), None


class FlippedWeights:
    """turning() makes all turned twins follow weights that have changed."""

    def __init__(self, weights: list[FrozenWeight], compiler: Compiler) -> None:
        self.pairs = [(each.turned, each.own) for each in weights if each.turned is not None]
        self._copied = compile_function(_copied, compiler)

    def __call__(self) -> None:
        """Turn them all."""
        if self.pairs:
            self._copied(*(list(part) for part in zip(*self.pairs, strict=True)))


def _copied(twins: list[Tensor], weights: list[Tensor]) -> None:
    for twin, own in zip(twins, weights, strict=True):
        twin.copy_(_turned(own))


def _turned(weight: Tensor) -> Tensor:
    return weight.flip(2, 3).transpose(0, 1)
