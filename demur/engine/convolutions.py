"""Convolutions of the fused trunk: frozen for attacks, with cast weights for training, forked.

    maps = FrozenConv(block.conv2)(active)      # computes no weight gradient
    skip, maps = fork_convolutions(active, shortcut.weight, conv.weight, stride)
    maps = casts[block.conv2](active)           # inside `with casts.refreshed()`

Each has the outputs and gradients of torch's convolutions, up to rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from demur.engine.copies import Compiler, compile_function, copy_tensors


class FrozenWeight:
    """The weight of a 3x3 convolution and, if its stride is 1, the flipped copy of it.

    With stride 1 the input gradient is itself a 3x3 convolution of the same shape, by the weight
    flipped in space and transposed in its channels. The kernels that cuDNN benchmark picked for
    the forward pass therefore serve the backward pass too.
    """

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


def fork_convolutions(
    active: Tensor, weight1x1: Tensor, weight3x3: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Return the 1x1 and the 3x3 convolution of maps of shape N, C, H, W.

    Autograd would scatter the gradient of the strided 1x1 convolution into a tensor of zeros and
    add that to the gradient of the 3x3 convolution. Here it is added in place at the strided
    positions: the same sum with less memory traffic.
    """
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


class CastConv:
    """A convolution by the weight that was cast for the current forward pass."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.stride, self.padding, self.weight = conv.stride, conv.padding, conv.weight.detach()

    def __call__(self, active: Tensor) -> Tensor:
        """Return the convolution of maps of shape N, C, H, W."""
        return conv2d(active, self.weight, stride=self.stride, padding=self.padding)


class CastWeights(dict[nn.Conv2d, CastConv]):
    """Copies in `dtype` of the weights that training updates, all cast by one launch.

        casts = CastWeights(convs, torch.bfloat16)
        with casts.refreshed():             # for one forward pass
            maps = casts[conv](active)      # conv with the weight cast for this pass

    Autocast casts each weight, and each weight gradient back, in a kernel of its own: forty short
    kernels a step. Casting all weights together gives the same values and gradients.
    """

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
