"""Batch norm and ReLU by the Triton kernels of `norm_kernels`, as one autograd function.

    total, active = norm(a, b)      # a + b (or a alone) and ReLU(norm(total))

Residual sum, batch norm and ReLU take two kernels in train mode and one in eval mode. The formulas
of forward and backward pass are those of nn.BatchNorm2d, so results agree up to rounding.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from demur.engine import norm_kernels as kernels


class Tile(NamedTuple):
    """Rows and channels that a program processes at a time, and its warps of 32 threads."""

    rows: int
    columns: int
    warps: int


# fastest on an H200 for the maps of a ResNet-18 at batch size 128
NORMALISE, AFFINE = Tile(128, 64, 4), Tile(32, 64, 4)
GRAD_TRAIN, GRAD_EVAL = Tile(64, 64, 4), Tile(16, 64, 8)
SUMS_FEW_CHANNELS, SUMS_MANY_CHANNELS, MANY_CHANNELS = Tile(64, 64, 8), Tile(64, 32, 4), 256
REDUCTION_PROGRAMS = 264  # two for each multiprocessor of a large GPU


class SavedStats(NamedTuple):
    """Buffers of one forward pass that the backward pass reads."""

    coefficients: Tensor  # 4, C: scale, shift, mean, 1 / sqrt(var + eps)
    sums: Tensor  # 2, 2, C: of the forward and the backward pass; zero before the forward pass


class FusedBatchNorm:
    """Batch norm followed by ReLU; train mode updates the running statistics of `source`.

    Args:
        source: the batch norm whose weights and running statistics are used.
        momentum_norm: the batch norm whose momentum is used: that of the copy which FrozenModel
            exposes, so that a training framework can set it to 0.
        sums: zeros of shape 2, 2, C.
        train: normalise by batch statistics.
        learn: compute gradients for the weight and bias of `source`.

    A forward pass overwrites the buffers of the last one unless `set_buffers` gives it new ones.
    """

    def __init__(
        self,
        source: nn.BatchNorm2d,
        momentum_norm: nn.BatchNorm2d,
        sums: Tensor,
        train: bool,
        learn: bool,
    ) -> None:
        self.source, self.momentum_norm, self.train, self.learn = (
            source, momentum_norm, train, learn,
        )  # fmt: skip
        self.saved = SavedStats(sums.new_zeros(4, source.num_features), sums)

    def __call__(self, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return total = a + b, or a without b, and ReLU(norm(total))."""
        weights = (self.source.weight, self.source.bias) if self.learn else (None, None)
        total, active = _FusedNorm.apply(a, b, *weights, self)  # type: ignore[no-untyped-call]
        return total, active

    def set_buffers(self, coefficients: Tensor, sums: Tensor) -> None:
        """Set the buffers of the next forward pass; `sums` must be zero."""
        self.saved = SavedStats(coefficients, sums)

    def forward(self, a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, SavedStats]:
        """Return the total, the active maps and the buffers for the backward pass."""
        saved = self.saved
        total = a if b is None else torch.empty_like(a)
        active, add = torch.empty_like(a), b is not None
        b_or_a = a if b is None else b
        grid = Grid.of(a)
        if not self.train:
            kernels.affine_kernel[grid.tiles(AFFINE)](
                a, b_or_a, total, active, saved.coefficients, *grid.size,
                add, *AFFINE[:2], num_warps=AFFINE.warps,
            )  # fmt: skip
            return total, active, saved
        rows_per_program, programs, tile = grid.reduction()
        kernels.sums_kernel[programs](
            a, b_or_a, total, saved.sums[0], *grid.size,
            rows_per_program, add, *tile[:2], num_warps=tile.warps,
        )  # fmt: skip
        source = self.source
        kernels.normalise_kernel[grid.tiles(NORMALISE)](
            total, active, saved.sums[0], source.weight, source.bias,
            source.running_mean, source.running_var, saved.coefficients, *grid.size,
            self.momentum_norm.momentum, source.eps, *NORMALISE[:2], num_warps=NORMALISE.warps,
        )  # fmt: skip
        return total, active, saved

    def backward(
        self, total: Tensor, saved: SavedStats, grad_active: Tensor, grad_total: Tensor | None
    ) -> Tensor:
        """Return the gradient with respect to the total, through the norm and the shortcut."""
        grad_active, out, grid = _rows(grad_active), torch.empty_like(total), Grid.of(total)
        if self.train:
            rows_per_program, programs, tile = grid.reduction()
            kernels.grad_sums_kernel[programs](
                grad_active, total, saved.coefficients, saved.sums[1], *grid.size,
                rows_per_program, *tile[:2], num_warps=tile.warps,
            )  # fmt: skip
        tile = GRAD_TRAIN if self.train else GRAD_EVAL
        kernels.grad_kernel[grid.tiles(tile)](
            grad_active, total, grad_active if grad_total is None else _rows(grad_total), out,
            saved.coefficients, saved.sums[1],
            *grid.size, grad_total is not None, self.train, *tile[:2], num_warps=tile.warps,
        )  # fmt: skip
        return out

    def weight_gradients(self, saved: SavedStats) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the source's weight and bias, after `backward`."""
        return (saved.sums[1, 1], saved.sums[1, 0]) if self.learn else (None, None)


class Grid(NamedTuple):
    """How programs divide maps, as a matrix of N H W rows and C channels."""

    size: tuple[int, int]

    @staticmethod
    def of(maps: Tensor) -> "Grid":
        """Return the grid of channels_last maps N, C, H, W."""
        channels = maps.shape[1]
        return Grid((maps.numel() // channels, channels))

    def tiles(self, tile: Tile) -> tuple[int, int]:
        """Return the launch grid of programs that process one tile each."""
        rows, channels = self.size
        return -(-rows // tile.rows), -(-channels // tile.columns)

    def reduction(self) -> tuple[int, tuple[int, int], Tile]:
        """Return the rows per program, the launch grid and the tile of a sum over rows."""
        rows, channels = self.size
        tile = SUMS_FEW_CHANNELS if channels < MANY_CHANNELS else SUMS_MANY_CHANNELS
        columns = -(-channels // tile.columns)
        rows_per_program = -(-rows * columns // REDUCTION_PROGRAMS // tile.rows) * tile.rows
        return rows_per_program, (-(-rows // rows_per_program), columns), tile


def _rows(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor | None, weight: Any, bias: Any, norm: FusedBatchNorm
    ) -> tuple[Tensor, Tensor]:
        total, active, ctx.saved = norm.forward(_rows(a), None if b is None else _rows(b))
        ctx.norm, ctx.added = norm, b is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total)
        return total.view_as(total), active

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_total, grad_active = grads
        (total,) = ctx.saved_tensors
        if grad_active is None:
            return grad_total, grad_total if ctx.added else None, None, None, None
        grad = ctx.norm.backward(total, ctx.saved, grad_active, grad_total)
        return grad, grad if ctx.added else None, *ctx.norm.weight_gradients(ctx.saved), None
