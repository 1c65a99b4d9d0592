"""Where a residual block forks: a 3x3 and a 1x1 convolution of the same maps, differentiated once.

    skip, maps = forked(active, shortcut.weight, conv.weight, stride)

Automatic differentiation would spread the shortcut's gradient over zeros and add that up; here it
is added where it belongs, onto what the other convolution gives back.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d


def fork_convolutions(
    active: Tensor, single: Tensor, weight: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Both convolutions of the maps."""
    skip, maps = _Fork.apply(active, single, weight, stride)  # type: ignore[no-untyped-call]
    return skip, maps


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, active: Tensor, single: Tensor, weight: Tensor, stride: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(active, single, weight)
        ctx.stride = stride
        skip = conv2d(active, single, stride=stride)
        return skip, conv2d(active, weight, stride=stride, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        active, single, weight = ctx.saved_tensors
        by_skip, by_maps = grads
        wanted, stride = ctx.needs_input_grad, ctx.stride
        before, by_weight = conv_gradients(by_maps, active, weight, stride, (wanted[0], wanted[2]))
        if wanted[0]:
            add_shortcut_gradient(before, by_skip, single, stride)
        by_single = None
        if wanted[1]:
            given, seen = by_skip.movedim(1, -1), _places(active, stride)
            by_single = (given.flatten(0, 2).t() @ seen.flatten(0, 2))[:, :, None, None]
        return before, by_single, by_weight, None


def conv_gradients(
    by_maps: Tensor, active: Tensor, weight: Tensor, stride: int, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of a 3x3 convolution with respect to what it saw and to its weight."""
    before, by_weight, _ = torch.ops.aten.convolution_backward(
        by_maps, active, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1,
        [*wanted, False],
    )  # fmt: skip
    return before, by_weight


def add_shortcut_gradient(before: Tensor, by_skip: Tensor, single: Tensor, stride: int) -> None:
    """Add what the single places give back to the gradient of the maps, in place."""
    _places(before, stride).add_(by_skip.movedim(1, -1) @ single[:, :, 0, 0])


def _places(maps: Tensor, stride: int) -> Tensor:
    """N, H, W, C: the places a strided single-place convolution looks at."""
    return maps[:, :, ::stride, ::stride].movedim(1, -1)
