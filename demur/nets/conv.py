"""3x3 convolutions whose gradient with respect to their input is itself a convolution.

    Conv3x3(16, 32, stride=2)

An attack asks for that gradient at every step. On CPUs for which the backward pass is not tuned
(ARM, small maps) the library's own takes up to ten times as long as a forward pass; this one takes
one forward pass. On a GPU, and where no gradient is asked for, it is the ordinary layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_weight


class Conv3x3(nn.Conv2d):
    """A convolution of padding 1 without bias."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__(width_in, width, 3, stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The convolved maps."""
        if x.device.type == "cpu" and torch.is_grad_enabled() and x.requires_grad:
            out: Tensor = _Convolution.apply(x, self.weight, self.stride[0])  # type: ignore[no-untyped-call]
            return out
        return super().forward(x)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return conv2d(x, weight, stride=stride, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (x, weight), stride = grads, ctx.saved_tensors, ctx.stride
        by_x = by_weight = None
        if ctx.needs_input_grad[0]:
            turned = weight.flip(2, 3).transpose(0, 1)
            by_x = conv2d(_spread(grad, x, stride), turned, padding=1)
        if ctx.needs_input_grad[1]:
            by_weight = conv2d_weight(x, weight.shape, grad, stride=stride, padding=1)
        return by_x, by_weight, None


def _spread(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    """The gradient at the places of x it belongs to, with zeros between for a stride."""
    if stride == 1:
        return grad
    wide = grad.new_zeros(*grad.shape[:2], *x.shape[2:])
    wide[:, :, ::stride, ::stride] = grad
    return wide
