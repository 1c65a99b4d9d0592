"""Convolutions that are the ordinary ones, computed the way that is fast where they run.

    Conv3x3(16, 32, stride=2)

An attack asks for the gradient with respect to the input at every step. On CPUs for which that is
not tuned (ARM, small maps) it takes up to ten forward passes; here it is itself a convolution. On
a GPU few input channels are made eight, and 1x1 kernels are matrix products. A convolution of
tiny maps is one matrix, where the net is `still`: it has learned all it will.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, pixel_shuffle
from torch.nn.grad import conv2d_weight

FEW = 8  # input channels below which a GPU's convolutions leave it idle
ALIGNED = 8  # sizes of matrix products that a GPU likes are multiples of this
SMALL = 2**16  # entries of the matrix up to which a CPU multiplies faster than it convolves


class Conv3x3(nn.Conv2d):
    """A convolution of padding 1 without bias."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__(width_in, width, 3, stride, padding=1, bias=False)
        self.still = False  # whether the weight will change no more
        self._matrix: tuple[Tensor, Tensor] | None = None  # the weight it was made of, and it

    def forward(self, x: Tensor) -> Tensor:
        """The convolved maps."""
        if self._is_small(x):
            return self._multiplied(x)
        if _ours_pays(x):
            out: Tensor = _Convolution.apply(x, self.weight, self.stride[0], self.still)  # type: ignore[no-untyped-call]
            return out
        if x.is_cuda and self.in_channels < FEW and self.stride == (1, 1):
            few: Tensor = _OfFewChannels.apply(*autocast_like(x, self.weight))  # type: ignore[no-untyped-call]
            return few
        return super().forward(x)

    def _is_small(self, x: Tensor) -> bool:
        """Whether it is a small matrix, on a CPU."""
        if not self.still or torch.compiler.is_compiling() or x.device.type != "cpu":
            return False
        if self.weight.is_inference() or torch.is_autocast_enabled("cpu"):
            return False
        places = x.shape[2] * x.shape[3]
        behind = -(-x.shape[2] // self.stride[0]) * -(-x.shape[3] // self.stride[1])
        return self.in_channels * places * self.out_channels * behind <= SMALL

    def _multiplied(self, x: Tensor) -> Tensor:
        """The convolution as one product, by a matrix that is made when the weight has changed."""
        count, made = x.shape[1:].numel(), self._matrix
        if made is None or len(made[1]) != count or not torch.equal(made[0], self.weight):
            with torch.inference_mode(False), torch.no_grad():
                each = torch.eye(count, dtype=x.dtype).view(count, *x.shape[1:])
                behind = conv2d(each, self.weight, stride=self.stride, padding=1)
                made = self._matrix = self.weight.detach().clone(), behind
        behind = made[1]
        return (x.flatten(1) @ behind.flatten(1)).view(len(x), *behind.shape[1:])


class Conv1x1(nn.Conv2d):
    """A convolution of single places without bias."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The convolved maps."""
        if not x.is_cuda:
            return super().forward(x)
        return conv1x1_matmul(x, self.weight, (self.stride[0], self.stride[1]))


def conv1x1_matmul(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """A 1x1 convolution as a matrix product."""
    places = x[:, :, :: stride[0], :: stride[1]].movedim(1, -1)  # N, H, W, C
    return (places @ weight[:, :, 0, 0].t()).movedim(-1, 1)


def _ours_pays(x: Tensor) -> bool:
    asked = torch.is_grad_enabled() and x.requires_grad
    return asked and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, still: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.still = stride, still
        return conv2d(x, weight, stride=stride, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,), (x, weight), stride = grads, ctx.saved_tensors, ctx.stride
        by_x = by_weight = None
        if ctx.needs_input_grad[0]:
            even = stride == 2 and not (x.shape[2] % 2 or x.shape[3] % 2)
            if even and ctx.still:  # training keeps the roundings it always had
                by_x = _by_quarters(grad, weight)
            else:
                turned = weight.flip(2, 3).transpose(0, 1)
                by_x = conv2d(_spread(grad, x, stride), turned, padding=1)
        if ctx.needs_input_grad[1]:
            by_weight = conv2d_weight(x, weight.shape, grad, stride=stride, padding=1)
        return by_x, by_weight, None, None


def _by_quarters(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a convolution of stride 2, for the four kinds of places side by side.

    A place in an even row was seen by the middle row of the kernel alone, one in an odd row by the
    last and the first; columns alike. So each kind is a convolution by two rows and two columns.
    """
    row = torch.tensor([[1, 3], [2, 0]], device=weight.device)  # of the kernel; the fourth is zero
    taps = pad(weight, [0, 1, 0, 1])[:, :, row[:, :, None, None], row]  # K, C, 2, 2, 2, 2
    kinds = taps.permute(1, 2, 4, 0, 3, 5).flatten(0, 2)  # 4 C, K, 2, 2
    return pixel_shuffle(conv2d(pad(grad, [0, 1, 0, 1]), kinds), 2)


def _spread(grad: Tensor, x: Tensor, stride: int) -> Tensor:
    """The gradient at the places of x it belongs to, with zeros between for a stride."""
    if stride == 1:
        return grad
    wide = grad.new_zeros(*grad.shape[:2], *x.shape[2:])
    wide[:, :, ::stride, ::stride] = grad
    return wide


class _OfFewChannels(torch.autograd.Function):
    """A 3x3 convolution of images as one of more channels, all but the first being zero.

    Its weight's gradient is a product with each place's nine neighbours.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = _wide(x)
        ctx.save_for_backward(x, wide, weight)
        return conv2d(wide, _widened(weight), padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (x, wide, weight) = grads, ctx.saved_tensors
        by_x = by_weight = None
        if ctx.needs_input_grad[0]:
            by_wide, _, _ = torch.ops.aten.convolution_backward(
                grad, wide, _widened(weight), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                [True, False, False],
            )  # fmt: skip
            by_x = by_wide[:, : x.shape[1]]
        if ctx.needs_input_grad[1]:
            taps = grad.movedim(1, -1).flatten(0, 2).t() @ _neighbours(x).flatten(0, 2)
            by_weight = taps[:, : 9 * x.shape[1]].unflatten(1, (3, 3, -1)).movedim(-1, 1)
        return by_x, by_weight


def _wide(x: Tensor) -> Tensor:
    """Images with zeros for channels that they do not have."""
    size = (len(x), FEW, *x.shape[2:])
    wide = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    wide.zero_()[:, : x.shape[1]] = x
    return wide


def _widened(weight: Tensor) -> Tensor:
    """The kernel with zeros for the channels that images do not have."""
    more = pad(weight, [0, 0, 0, 0, 0, FEW - weight.shape[1]])
    return more.contiguous(memory_format=torch.channels_last)


def _neighbours(x: Tensor) -> Tensor:
    """N, H, W, 9 C: the channels of each place's nine neighbours, padded for the product."""
    height, width = x.shape[2:]
    wide = pad(x.movedim(1, -1), [0, 0, 1, 1, 1, 1])
    parts = [wide[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    missing = -9 * x.shape[1] % ALIGNED
    return torch.cat([*parts, x.new_zeros(1).expand(len(x), height, width, missing)], -1)


def autocast_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as autocast would have them, for functions that it does not know."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype("cuda")) for tensor in tensors)
