"""The first half of a residual block: its shortcut, first convolution, second norm and ReLU.

    skip, active = half(total, active)

In eval mode the norm is worked into the convolution, and the library adds the shift and cuts off
below zero before it writes the maps: they are written once.
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
    """With a norm of its own, in train mode."""

    def __init__(self, conv: Convolution, norm: FusedBatchNorm) -> None:
        self.conv, self.norm = conv, norm

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """What goes past the block, and the active maps within."""
        return total, self.norm(self.conv(active))[1]


class ForkedBlockHalf:
    """The same where the block's shortcut is a convolution too."""

    def __init__(self, conv: Learnable, shortcut: Learnable, norm: FusedBatchNorm) -> None:
        assert shortcut.stride == conv.stride
        self.conv, self.shortcut, self.norm = conv, shortcut, norm

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """What goes past the block, and the active maps within."""
        conv, shortcut = self.conv, self.shortcut
        skip, maps = fork_convolutions(active, shortcut.weight, conv.weight, conv.stride[0])
        return skip, self.norm(maps)[1]


class FoldedBlockHalf:
    """With the norm worked into the convolution, in eval mode; nothing in it learns.

    `weight` and `shift` are filled from outside, which also makes them follow a net that learns.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.weight = block, FrozenWeight(block.conv1)
        self.shift = block.conv1.weight.new_zeros(len(block.conv1.weight))

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """What goes past the block, and the active maps within."""
        shortcut = self.block.shortcut
        single = None if shortcut is None else shortcut.weight
        skip, within = _Folded.apply(active, self.weight, self.shift, single)  # type: ignore[no-untyped-call]
        return total if skip is None else skip, within


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, active: Tensor, weight: FrozenWeight, shift: Tensor, single: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        skip = None if single is None else conv2d(active, single, stride=weight.stride)
        within = _cut_off(active, weight.own, shift, weight.stride)
        ctx.save_for_backward(active, single, within)
        ctx.weight = weight
        return skip, within

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        active, single, within = ctx.saved_tensors
        by_skip, by_within = grads
        by_maps = torch.ops.aten.threshold_backward(by_within, within, 0)
        before = ctx.weight.given_back(by_maps, active)
        if single is not None:
            add_shortcut_gradient(before, by_skip, single, ctx.weight.stride)
        return before, None, None, None


def _cut_off(active: Tensor, weight: Tensor, shift: Tensor, stride: int) -> Tensor:
    """ReLU of the shifted convolution."""
    if active.is_cuda:
        made: Tensor = torch.cudnn_convolution_relu(
            active, weight, shift, [stride, stride], [1, 1], [1, 1], 1
        )
        return made
    return relu(conv2d(active, weight, shift, stride, padding=1))
