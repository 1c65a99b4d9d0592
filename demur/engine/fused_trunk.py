"""A residual trunk between its first and last maps, on kernels of our own."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from demur.engine import norm_kernels
from demur.engine.block_halves import BlockHalf, Convolution, FoldedBlockHalf, ForkedBlockHalf
from demur.engine.cast_weights import CastWeights
from demur.engine.copies import Compiler
from demur.engine.folding import scales_and_shifts
from demur.engine.frozen_conv import FlippedWeights, FrozenConv
from demur.engine.fused_norm import FusedBatchNorm
from demur.nets.block import Block


class FusedTrunk:
    """The trunk between its first and last maps: its convolutions, the source's norms.

    Where it learns its convolutions are `casts`, and their weights and the norms' get gradients.
    """

    def __init__(
        self, trunk: nn.Module, source: nn.Module, train: bool,
        casts: CastWeights | None = None, compiler: Compiler = "none",
    ) -> None:  # fmt: skip
        norms, twins, self.blocks = batch_norms_of(source), batch_norms_of(trunk), _blocks(trunk)
        self.train, self.casts = train, casts
        self.sizes = [4 * norm.num_features for norm in norms]
        self.sums = torch.zeros(sum(self.sizes), device=norms[0].weight.device)
        quick = [
            FusedBatchNorm(norm, twin, part.view(2, 2, -1), train, learn=casts is not None)
            for norm, twin, part in zip(norms, twins, self.sums.split(self.sizes), strict=True)
        ]
        self.opening, self.last, within = quick[:-1:2], quick[-1], quick[1::2]  # of each block
        self.folded = [] if train else [FoldedBlockHalf(block) for block in self.blocks]
        self.halves: list[BlockHalf | ForkedBlockHalf | FoldedBlockHalf] = [*self.folded]
        if train:
            self.halves = [
                self._half(block, norm) for block, norm in zip(self.blocks, within, strict=True)
            ]
        self.seconds = [self._of(block.conv2) for block in self.blocks]
        self.norms = quick if train else [*self.opening, self.last]
        self.folds = [] if train else _folds(source)
        still = [half.weight for half in self.folded]
        still += [conv.weight for conv in self._convolutions() if isinstance(conv, FrozenConv)]
        self.turn = FlippedWeights(still, compiler)

    def __call__(self, maps: Tensor) -> Tensor:
        """The last active maps; each block's sum waits for the norm of the next one."""
        self._begin()
        waiting: Tensor | None = None
        with nullcontext() if self.casts is None else self.casts.renewed():
            for norm, half, second in zip(self.opening, self.halves, self.seconds, strict=True):
                total, active = norm(maps, waiting)
                waiting, active = half(total, active)
                maps = second(active)
        return self.last(maps, waiting)[1]

    def _half(self, block: Block, norm: FusedBatchNorm) -> BlockHalf | ForkedBlockHalf:
        if block.shortcut is None:
            return BlockHalf(self._of(block.conv1), norm)
        if self.casts is None:
            return ForkedBlockHalf(block.conv1, block.shortcut, norm)
        return ForkedBlockHalf(self.casts[block.conv1], self.casts[block.shortcut], norm)

    def _of(self, conv: nn.Conv2d) -> Convolution:
        return FrozenConv(conv) if self.casts is None else self.casts[conv]

    def _convolutions(self) -> list[Convolution]:
        return [half.conv for half in self.halves if isinstance(half, BlockHalf)] + self.seconds

    def _begin(self) -> None:
        """Forget the last look, or where it may be differentiated yet, keep this one elsewhere."""
        if self.casts is not None:
            self._look_elsewhere()
        elif self.train:
            self.sums.zero_()
        self._count()

    def _look_elsewhere(self) -> None:
        sums, kept = torch.zeros_like(self.sums), torch.empty_like(self.sums)
        parts = zip(self.norms, kept.split(self.sizes), sums.split(self.sizes), strict=True)
        for norm, own, added in parts:
            norm.keep_in(own.view(4, -1), added.view(2, 2, -1))

    @torch.no_grad()
    def _count(self) -> None:
        if self.train and self.last.twin.momentum != 0:
            seen = [norm.source.get_buffer("num_batches_tracked") for norm in self.norms]
            torch._foreach_add_(seen, 1)

    def settle(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where scales, shifts and folded weights of eval mode are held, and what they are now."""
        alone = len(self.norms)
        scales, shifts = scales_and_shifts(
            [norm.source for norm in self.norms] + [norm for _, norm in self.folds]
        )
        wide = [scale[:, None, None, None] for scale in scales[alone:]]
        weights = torch._foreach_mul([conv.weight.detach() for conv, _ in self.folds], wide)
        kept = [norm.last.kept for norm in self.norms]
        places = [part[norm_kernels.SCALE] for part in kept]
        places += [part[norm_kernels.SHIFT] for part in kept]
        places += [half.shift for half in self.folded] + [half.weight.own for half in self.folded]
        return places, [*scales[:alone], *shifts, *weights]


def batch_norms_of(trunk: nn.Module) -> list[nn.BatchNorm2d]:
    """Two of each block, and the last one."""
    return [module for module in trunk.modules() if isinstance(module, nn.BatchNorm2d)]


def _blocks(trunk: nn.Module) -> list[Block]:
    return [module for module in trunk.modules() if isinstance(module, Block)]


def convolutions_of(trunk: nn.Module) -> list[nn.Conv2d]:
    """Those of all blocks."""
    blocks = _blocks(trunk)
    return [part for block in blocks for part in block.modules() if isinstance(part, nn.Conv2d)]


def _folds(trunk: nn.Module) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """The convolutions of a trunk that take the norm behind them in."""
    pairs = [(block.conv1, block.norm2) for block in _blocks(trunk)]
    return [(conv, norm) for conv, norm in pairs if isinstance(norm, nn.BatchNorm2d)]
