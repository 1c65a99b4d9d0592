"""A 3x3 and a 1x1 convolution of the same maps with one joint backward pass.

    skip, maps = fork_convolutions(active, shortcut.weight, conv.weight, stride)

Autograd would scatter the gradient of the strided 1x1 convolution into a tensor of zeros and add
that to the gradient of the 3x3 convolution. Here it is added in place at the strided positions:
the same sum with less memory traffic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d


def fork_convolutions(
    active: Tensor, weight1x1: Tensor, weight3x3: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Return the 1x1 and the 3x3 convolution of maps of shape N, C, H, W."""
    skip, maps = _Fork.apply(active, weight1x1, weight3x3, stride)  # type: ignore[no-untyped-call]
    return skip, maps


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, active: Tensor, weight1x1: Tensor, weight3x3: Tensor, stride: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(active, weight1x1, weight3x3)
        ctx.stride = stride
        skip = conv2d(active, weight1x1, stride=stride)
        return skip, conv2d(active, weight3x3, stride=stride, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        active, weight1x1, weight3x3 = ctx.saved_tensors
        grad_skip, grad_maps = grads
        needed, stride = ctx.needs_input_grad, ctx.stride
        grad_active, grad_weight3x3 = conv3x3_gradients(
            grad_maps, active, weight3x3, stride, (needed[0], needed[2])
        )
        if needed[0]:
            add_shortcut_gradient(grad_active, grad_skip, weight1x1, stride)
        grad_weight1x1 = None
        if needed[1]:
            rows, inputs = grad_skip.movedim(1, -1), _strided_positions(active, stride)
            grad_weight1x1 = (rows.flatten(0, 2).t() @ inputs.flatten(0, 2))[:, :, None, None]
        return grad_active, grad_weight1x1, grad_weight3x3, None


def conv3x3_gradients(
    grad_maps: Tensor, active: Tensor, weight: Tensor, stride: int, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a 3x3 convolution with respect to its input and its weight."""
    grad_active, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad_maps, active, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1,
        [*needed, False],
    )  # fmt: skip
    return grad_active, grad_weight


def add_shortcut_gradient(
    grad_active: Tensor, grad_skip: Tensor, weight1x1: Tensor, stride: int
) -> None:
    """Add the input gradient of the 1x1 convolution to `grad_active` in place."""
    _strided_positions(grad_active, stride).add_(grad_skip.movedim(1, -1) @ weight1x1[:, :, 0, 0])


def _strided_positions(maps: Tensor, stride: int) -> Tensor:
    """Return a view N, H, W, C of the positions that a strided 1x1 convolution reads."""
    return maps[:, :, ::stride, ::stride].movedim(1, -1)
