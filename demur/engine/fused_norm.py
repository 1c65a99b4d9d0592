"""Batch norm and ReLU by the kernels of `norm_kernels`, with a history for autograd.

total, active = norm(a, b)      # the residual sum a + b, or a itself, and ReLU(norm(total))
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from demur.engine import norm_kernels as kernels


class Tile(NamedTuple):
    """Rows and channels that a program takes at a time, and its threads by 32."""

    rows: int
    columns: int
    warps: int


# measured on an H200 over the maps of a ResNet-18 at batch 128
NORMALISE, AFFINE = Tile(128, 64, 4), Tile(32, 64, 4)
GRAD_TRAIN, GRAD_EVAL = Tile(64, 64, 4), Tile(16, 64, 8)
SUMS_OF_FEW, SUMS_OF_MANY, MANY = Tile(64, 64, 8), Tile(64, 32, 4), 256  # channels
PROGRAMS = 264  # that add up sums: two for each of a large GPU's processors


class SavedStats(NamedTuple):
    """What a norm remembers of one look at its maps."""

    kept: Tensor  # 4, C: scale, shift, mean, spread
    sums: Tensor  # 2, 2, C: forwards and backwards; zero before the look


class FusedBatchNorm:
    """A batch norm with ReLU behind it; in train mode it moves its source's statistics.

    How far is the momentum of its twin, the copy that a crafter shows to the frame.

    With `learn` the source's weights get gradients. The next look overwrites the last one, unless
    it is to be kept elsewhere.
    """

    def __init__(
        self, source: nn.BatchNorm2d, twin: nn.BatchNorm2d, sums: Tensor, train: bool, learn: bool
    ) -> None:
        self.source, self.twin, self.train, self.learn = source, twin, train, learn
        self.last = SavedStats(sums.new_zeros(4, source.num_features), sums)

    def __call__(self, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum of the maps there are, and the active maps of it."""
        weights = (self.source.weight, self.source.bias) if self.learn else (None, None)
        total, active = _Norm.apply(a, b, *weights, self)  # type: ignore[no-untyped-call]
        return total, active

    def keep_in(self, kept: Tensor, sums: Tensor) -> None:
        """Where to keep what comes; the sums are zero."""
        self.last = SavedStats(kept, sums)

    def forward(self, a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, SavedStats]:
        """The sum, which is a where there is no b, the active maps, and the look."""
        saved = self.last
        total = a if b is None else torch.empty_like(a)
        active, added = torch.empty_like(a), b is not None
        beside = a if b is None else b
        grid = Grid.of(a)
        if not self.train:
            kernels.affine_kernel[grid.tiles(AFFINE)](
                a, beside, total, active, saved.kept, *grid.size,
                added, *AFFINE[:2], num_warps=AFFINE.warps,
            )  # fmt: skip
            return total, active, saved
        span, spans, tile = grid.spans()
        kernels.sums_kernel[spans](
            a, beside, total, saved.sums[0], *grid.size,
            span, added, *tile[:2], num_warps=tile.warps,
        )  # fmt: skip
        source = self.source
        kernels.normalise_kernel[grid.tiles(NORMALISE)](
            total, active, saved.sums[0], source.weight, source.bias,
            source.running_mean, source.running_var, saved.kept, *grid.size,
            self.twin.momentum, source.eps, *NORMALISE[:2], num_warps=NORMALISE.warps,
        )  # fmt: skip
        return total, active, saved

    def backward(
        self, maps: Tensor, saved: SavedStats, grad: Tensor, past: Tensor | None
    ) -> Tensor:
        """The gradient before the norm, plus the one that came past it."""
        grad, out, grid = _rows(grad), torch.empty_like(maps), Grid.of(maps)
        if self.train:
            span, spans, tile = grid.spans()
            kernels.grad_sums_kernel[spans](
                grad, maps, saved.kept, saved.sums[1], *grid.size,
                span, *tile[:2], num_warps=tile.warps,
            )  # fmt: skip
        tile = GRAD_TRAIN if self.train else GRAD_EVAL
        kernels.grad_kernel[grid.tiles(tile)](
            grad, maps, grad if past is None else _rows(past), out, saved.kept, saved.sums[1],
            *grid.size, past is not None, self.train, *tile[:2], num_warps=tile.warps,
        )  # fmt: skip
        return out

    def weight_gradients(self, saved: SavedStats) -> tuple[Tensor | None, Tensor | None]:
        """Of the source's weight and bias, after `backward`."""
        return (saved.sums[1, 1], saved.sums[1, 0]) if self.learn else (None, None)


class Grid(NamedTuple):
    """How programs share out maps, seen as rows of channels."""

    size: tuple[int, int]

    @staticmethod
    def of(maps: Tensor) -> "Grid":
        """The grid of channels-last maps."""
        channels = maps.shape[1]
        return Grid((maps.numel() // channels, channels))

    def tiles(self, tile: Tile) -> tuple[int, int]:
        """Programs that take a tile each."""
        rows, channels = self.size
        return -(-rows // tile.rows), -(-channels // tile.columns)

    def spans(self) -> tuple[int, tuple[int, int], Tile]:
        """Rows of each program that adds up, all of those programs, and what each takes at once."""
        rows, channels = self.size
        tile = SUMS_OF_FEW if channels < MANY else SUMS_OF_MANY
        across = -(-channels // tile.columns)
        span = -(-rows * across // PROGRAMS // tile.rows) * tile.rows
        return span, (-(-rows // span), across), tile


def _rows(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


class _Norm(torch.autograd.Function):
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
        past, behind = grads
        (total,) = ctx.saved_tensors
        if behind is None:
            return past, past if ctx.added else None, None, None, None
        before = ctx.norm.backward(total, ctx.saved, behind, past)
        return before, before if ctx.added else None, *ctx.norm.weight_gradients(ctx.saved), None
