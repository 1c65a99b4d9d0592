"""3x3 convolutions with frozen weights, for the forward and backward passes of an attack.

    maps = FrozenConv(block.conv2)(active)

With stride 1 the input gradient is itself a 3x3 convolution of the same shape, by the weight
flipped in space and transposed in its channels. The kernels that cuDNN benchmark picked for the
forward pass therefore serve the backward pass too. No weight gradient is computed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from demur.engine.copies import Compiler, compile_function
from demur.engine.fork import conv3x3_gradients


class FrozenWeight:
    """The weight of a 3x3 convolution and, if its stride is 1, the flipped copy of it."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.weight, self.stride = conv.weight.detach(), conv.stride[0]
        self.flipped: Tensor | None = None
        if self.stride == 1:
            layout = torch.channels_last if self.weight.is_cuda else torch.contiguous_format
            self.flipped = _flip(self.weight).contiguous(memory_format=layout)

    def input_gradient(self, grad_maps: Tensor, active: Tensor) -> Tensor:
        """Return the gradient with respect to `active`, the input of the convolution."""
        if self.flipped is not None:
            return conv2d(grad_maps, self.flipped, padding=1)
        return conv3x3_gradients(grad_maps, active, self.weight, self.stride, (True, False))[0]


class FrozenConv:
    """A 3x3 convolution whose weight has no gradient."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.weight = FrozenWeight(conv)

    def __call__(self, active: Tensor) -> Tensor:
        """Return the convolution of maps of shape N, C, H, W."""
        maps: Tensor = _FrozenConvolution.apply(active, self.weight)  # type: ignore[no-untyped-call]
        return maps


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, active: Tensor, weight: FrozenWeight) -> Tensor:
        ctx.save_for_backward(active)
        ctx.weight = weight
        return conv2d(active, weight.weight, stride=weight.stride, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (active,) = ctx.saved_tensors
        return ctx.weight.input_gradient(grads[0], active), None


class FlippedWeights:
    """Call it to rewrite all flipped copies in place after the weights have changed."""

    def __init__(self, weights: list[FrozenWeight], compiler: Compiler) -> None:
        self.pairs = [(w.flipped, w.weight) for w in weights if w.flipped is not None]
        self._copy_flipped = compile_function(_copy_flipped, compiler)

    def __call__(self) -> None:
        """Update all flipped copies."""
        if self.pairs:
            self._copy_flipped(*(list(part) for part in zip(*self.pairs, strict=True)))


def _copy_flipped(flipped: list[Tensor], weights: list[Tensor]) -> None:
    for copy, weight in zip(flipped, weights, strict=True):
        copy.copy_(_flip(weight))


def _flip(weight: Tensor) -> Tensor:
    return weight.flip(2, 3).transpose(0, 1)
