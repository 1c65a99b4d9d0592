"""The first half of a residual block: shortcut, first convolution, second batch norm and ReLU.

    skip, hidden = half(total, active)

In eval mode batch norm is folded into the convolution, and cuDNN adds the shift and applies ReLU
in the same kernel, so the feature maps are written once. Folding only reassociates the products
of batch norm, so the result equals the plain block up to rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from demur.engine.cast_weights import CastConv
from demur.engine.fork import add_shortcut_gradient, fork_convolutions
from demur.engine.frozen_conv import FrozenConv, FrozenWeight
from demur.engine.fused_norm import FusedBatchNorm
from demur.nets.block import Block

Learnable = nn.Conv2d | CastConv
Convolution = Learnable | FrozenConv


class BlockHalf:
    """Convolution, batch norm and ReLU of a block with an identity shortcut, in train mode."""

    def __init__(self, conv: Convolution, norm: FusedBatchNorm) -> None:
        self.conv, self.norm = conv, norm

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortcut and the hidden maps.

        `total` is the input of the block, `active` is ReLU(norm1(total)).
        """
        return total, self.norm(self.conv(active))[1]


class ForkedBlockHalf:
    """The same for a block whose shortcut is a 1x1 convolution."""

    def __init__(self, conv: Learnable, shortcut: Learnable, norm: FusedBatchNorm) -> None:
        assert shortcut.stride == conv.stride
        self.conv, self.shortcut, self.norm = conv, shortcut, norm

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortcut and the hidden maps."""
        conv, shortcut = self.conv, self.shortcut
        skip, maps = fork_convolutions(active, shortcut.weight, conv.weight, conv.stride[0])
        return skip, self.norm(maps)[1]


class FoldedBlockHalf:
    """The same in eval mode with batch norm folded into the convolution and frozen weights.

    The caller writes `weight` and `shift` in place, once or after every training step.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.weight = block, FrozenWeight(block.conv1)
        self.shift = block.conv1.weight.new_zeros(len(block.conv1.weight))

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortcut and the hidden maps."""
        shortcut = self.block.shortcut
        weight1x1 = None if shortcut is None else shortcut.weight
        skip, hidden = _FoldedHalf.apply(active, self.weight, self.shift, weight1x1)  # type: ignore[no-untyped-call]
        return total if skip is None else skip, hidden


class _FoldedHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, active: Tensor, weight: FrozenWeight, shift: Tensor, weight1x1: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        skip = None if weight1x1 is None else conv2d(active, weight1x1, stride=weight.stride)
        hidden = _conv_relu(active, weight.weight, shift, weight.stride)
        ctx.save_for_backward(active, weight1x1, hidden)
        ctx.weight = weight
        return skip, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        active, weight1x1, hidden = ctx.saved_tensors
        grad_skip, grad_hidden = grads
        grad_maps = torch.ops.aten.threshold_backward(grad_hidden, hidden, 0)
        grad_active = ctx.weight.input_gradient(grad_maps, active)
        if weight1x1 is not None:
            add_shortcut_gradient(grad_active, grad_skip, weight1x1, ctx.weight.stride)
        return grad_active, None, None, None


def _conv_relu(active: Tensor, weight: Tensor, shift: Tensor, stride: int) -> Tensor:
    """Return ReLU(conv3x3(active) + shift)."""
    if active.is_cuda:
        out: Tensor = torch.cudnn_convolution_relu(
            active, weight, shift, [stride, stride], [1, 1], [1, 1], 1
        )
        return out
    return relu(conv2d(active, weight, shift, stride, padding=1))
