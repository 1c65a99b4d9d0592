"""Batch norm and ReLU by the kernels of `norm_kernels`, with a history for autograd.

active = norm(maps)                    # ReLU(norm(maps))
total, active = norm.of_sum(a, b)      # the residual sum a + b, and ReLU(norm(a + b))
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from demur.engine import norm_kernels as kernels

ROWS, COLUMNS = 128, 64  # of a tile
PROGRAMS = 528  # that add up sums: four for each of a large GPU's processors


class Look(NamedTuple):
    """What a norm remembers of one look at its maps."""

    kept: Tensor  # 4, C: scale, shift, mean, spread
    sums: Tensor  # 2, 2, C: forwards and backwards; zero before the look


class QuickNorm:
    """A batch norm with ReLU behind it; in train mode it moves its source's statistics.

    How far is the momentum of its twin, the copy that a crafter shows to the frame.

    With `learn` the source's weights get gradients, and every look is remembered by itself.
    Without, the next look overwrites the last one, which was differentiated by then.
    """

    def __init__(
        self, source: nn.BatchNorm2d, twin: nn.BatchNorm2d, sums: Tensor, train: bool, learn: bool
    ) -> None:
        self.source, self.twin, self.train, self.learn = source, twin, train, learn
        self.last = Look(sums.new_zeros(4, source.num_features), sums)

    def __call__(self, maps: Tensor) -> Tensor:
        """The active maps."""
        active: Tensor = _Norm.apply(maps, *self._weights(), self)  # type: ignore[no-untyped-call]
        return active

    def of_sum(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of two maps and the active maps of it."""
        total, active = _SumNorm.apply(a, b, *self._weights(), self)  # type: ignore[no-untyped-call]
        return total, active

    def _weights(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return (self.source.weight, self.source.bias) if self.learn else (None, None)

    def forward(self, a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Look]:
        """The sum, which is a where there is no b, the active maps, and the look."""
        look = Look(*(torch.zeros_like(part) for part in self.last)) if self.learn else self.last
        total = a if b is None else torch.empty_like(a)
        active, added = torch.empty_like(a), b is not None
        beside = a if b is None else b
        grid = Grid.of(a)
        if not self.train:
            kernels.affine_kernel[grid.tiles](
                a, beside, total, active, look.kept, grid.rows, grid.channels,
                added, ROWS, grid.columns,
            )  # fmt: skip
            return total, active, look
        kernels.sums_kernel[grid.spans](
            a, beside, total, look.sums[0], grid.rows, grid.channels,
            grid.span, added, ROWS, grid.columns,
        )  # fmt: skip
        source = self.source
        kernels.normalise_kernel[grid.tiles](
            total, active, look.sums[0], source.weight, source.bias,
            source.running_mean, source.running_var, look.kept, grid.rows, grid.channels,
            self.twin.momentum, source.eps, ROWS, grid.columns,
        )  # fmt: skip
        return total, active, look

    def backward(self, maps: Tensor, look: Look, grad: Tensor, past: Tensor | None) -> Tensor:
        """The gradient before the norm, plus the one that came past it."""
        grad, out, grid = _rows(grad), torch.empty_like(maps), Grid.of(maps)
        if self.train:
            kernels.grad_sums_kernel[grid.spans](
                grad, maps, look.kept, look.sums[1], grid.rows, grid.channels,
                grid.span, ROWS, grid.columns,
            )  # fmt: skip
        kernels.grad_kernel[grid.tiles](
            grad, maps, grad if past is None else _rows(past), out, look.kept, look.sums[1],
            grid.rows, grid.channels, past is not None, self.train, ROWS, grid.columns,
        )  # fmt: skip
        return out

    def weight_gradients(self, look: Look) -> tuple[Tensor | None, Tensor | None]:
        """Of the source's weight and bias, after `backward`."""
        return (look.sums[1, 1], look.sums[1, 0]) if self.learn else (None, None)


class Grid(NamedTuple):
    """How programs share out maps, seen as rows of channels."""

    rows: int
    channels: int
    columns: int  # of a tile
    span: int  # rows of a program that adds up
    tiles: tuple[int, int]  # programs that take a tile each
    spans: tuple[int, int]  # programs that add up

    @staticmethod
    def of(maps: Tensor) -> "Grid":
        """The grid of channels-last maps."""
        channels = maps.shape[1]
        count = maps.numel() // channels
        columns = min(COLUMNS, 1 << (channels - 1).bit_length())
        across = -(-channels // columns)
        span = -(-count * across // PROGRAMS // ROWS) * ROWS
        tiles, spans = (-(-count // ROWS), across), (-(-count // span), across)
        return Grid(count, channels, columns, span, tiles, spans)


def _rows(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Any, bias: Any, norm: QuickNorm) -> Tensor:
        maps = _rows(maps)
        _, active, ctx.look = norm.forward(maps, None)
        ctx.norm = norm
        ctx.save_for_backward(maps)
        return active

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (maps,) = ctx.saved_tensors
        before = ctx.norm.backward(maps, ctx.look, grads[0], None)
        return before, *ctx.norm.weight_gradients(ctx.look), None


class _SumNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, weight: Any, bias: Any, norm: QuickNorm
    ) -> tuple[Tensor, Tensor]:
        total, active, ctx.look = norm.forward(_rows(a), _rows(b))
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total)
        return total, active

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        past, behind = grads
        (total,) = ctx.saved_tensors
        if behind is None:
            return past, past, None, None, None
        before = ctx.norm.backward(total, ctx.look, behind, past)
        return before, before, *ctx.norm.weight_gradients(ctx.look), None
