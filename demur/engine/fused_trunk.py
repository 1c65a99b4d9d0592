"""The residual blocks of a trunk with fused batch norm, ReLU and residual sums.

Each block's residual sum is computed by the kernel of the next batch norm, so no sum is written
and read again. With frozen weights the trunk computes input gradients only; in eval mode it folds
every second batch norm. The result equals the plain trunk up to rounding.
"""

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
    """The trunk from the output of the stem to the last active maps.

    Args:
        trunk: the trunk whose convolutions are used: a copy, or the source itself in training.
        source: the trunk whose batch norms are used.
        train: the mode of batch norm.
        casts: the convolutions in training; weights of these and of batch norm get gradients.
            None: all weights are frozen.
        compiler: for the update of flipped weights.
    """

    def __init__(
        self, trunk: nn.Module, source: nn.Module, train: bool,
        casts: CastWeights | None = None, compiler: Compiler = "none",
    ) -> None:  # fmt: skip
        norms, own_norms = batch_norms_of(source), batch_norms_of(trunk)
        self.blocks, self.train, self.casts = _blocks(trunk), train, casts
        self.sizes = [4 * norm.num_features for norm in norms]
        self.sums = torch.zeros(sum(self.sizes), device=norms[0].weight.device)
        sums = self.sums.split(self.sizes)
        fused_norms = [
            FusedBatchNorm(norm, own, part.view(2, 2, -1), train, learn=casts is not None)
            for norm, own, part in zip(norms, own_norms, sums, strict=True)
        ]
        # norm1 and norm2 of each block, then the norm after the last block
        self.first_norms, self.last_norm = fused_norms[:-1:2], fused_norms[-1]
        second_norms = fused_norms[1::2]
        self.folded = [] if train else [FoldedBlockHalf(block) for block in self.blocks]
        self.halves: list[BlockHalf | ForkedBlockHalf | FoldedBlockHalf] = [*self.folded]
        if train:
            pairs = zip(self.blocks, second_norms, strict=True)
            self.halves = [self._first_half(block, norm) for block, norm in pairs]
        self.second_convs = [self._convolution(block.conv2) for block in self.blocks]
        self.norms = fused_norms if train else [*self.first_norms, self.last_norm]
        self.folds = [] if train else _folds(source)
        frozen = [half.weight for half in self.folded]
        frozen += [conv.weight for conv in self._convolutions() if isinstance(conv, FrozenConv)]
        self.update_flipped = FlippedWeights(frozen, compiler)

    def __call__(self, maps: Tensor) -> Tensor:
        """Return the last active maps, N, C, H, W."""
        self._prepare_buffers()
        skip: Tensor | None = None  # added by the first norm of the next block
        with nullcontext() if self.casts is None else self.casts.refreshed():
            for norm, half, conv in zip(
                self.first_norms, self.halves, self.second_convs, strict=True
            ):
                total, active = norm(maps, skip)
                skip, active = half(total, active)
                maps = conv(active)
        return self.last_norm(maps, skip)[1]

    def _first_half(self, block: Block, norm: FusedBatchNorm) -> BlockHalf | ForkedBlockHalf:
        if block.shortcut is None:
            return BlockHalf(self._convolution(block.conv1), norm)
        if self.casts is None:
            return ForkedBlockHalf(block.conv1, block.shortcut, norm)
        return ForkedBlockHalf(self.casts[block.conv1], self.casts[block.shortcut], norm)

    def _convolution(self, conv: nn.Conv2d) -> Convolution:
        return FrozenConv(conv) if self.casts is None else self.casts[conv]

    def _convolutions(self) -> list[Convolution]:
        first_convs = [half.conv for half in self.halves if isinstance(half, BlockHalf)]
        return first_convs + self.second_convs

    def _prepare_buffers(self) -> None:
        """Zero the sums; allocate new ones in training, where two passes share a backward pass."""
        if self.casts is not None:
            self._new_buffers()
        elif self.train:
            self.sums.zero_()
        self._count_batch()

    def _new_buffers(self) -> None:
        sums, coefficients = torch.zeros_like(self.sums), torch.empty_like(self.sums)
        coefficient_parts, sum_parts = coefficients.split(self.sizes), sums.split(self.sizes)
        parts = zip(self.norms, coefficient_parts, sum_parts, strict=True)
        for norm, own_coefficients, own_sums in parts:
            norm.set_buffers(own_coefficients.view(4, -1), own_sums.view(2, 2, -1))

    @torch.no_grad()
    def _count_batch(self) -> None:
        if self.train and self.last_norm.momentum_norm.momentum != 0:
            counts = [norm.source.get_buffer("num_batches_tracked") for norm in self.norms]
            torch._foreach_add_(counts, 1)

    def eval_constants(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers of scales, shifts and folded weights, and their current values."""
        unfolded = len(self.norms)
        scales, shifts = scales_and_shifts(
            [norm.source for norm in self.norms] + [norm for _, norm in self.folds]
        )
        conv_scales = [scale[:, None, None, None] for scale in scales[unfolded:]]
        weights = torch._foreach_mul([conv.weight.detach() for conv, _ in self.folds], conv_scales)
        coefficients = [norm.saved.coefficients for norm in self.norms]
        buffers = [rows[norm_kernels.SCALE] for rows in coefficients]
        buffers += [rows[norm_kernels.SHIFT] for rows in coefficients]
        buffers += [half.shift for half in self.folded]
        buffers += [half.weight.weight for half in self.folded]
        return buffers, [*scales[:unfolded], *shifts, *weights]


def batch_norms_of(trunk: nn.Module) -> list[nn.BatchNorm2d]:
    """Return two batch norms of each block, then the last one."""
    return [module for module in trunk.modules() if isinstance(module, nn.BatchNorm2d)]


def _blocks(trunk: nn.Module) -> list[Block]:
    return [module for module in trunk.modules() if isinstance(module, Block)]


def convolutions_of(trunk: nn.Module) -> list[nn.Conv2d]:
    """Return the convolutions of all blocks."""
    blocks = _blocks(trunk)
    return [part for block in blocks for part in block.modules() if isinstance(part, nn.Conv2d)]


def _folds(trunk: nn.Module) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Return each convolution with the batch norm that is folded into it."""
    pairs = [(block.conv1, block.norm2) for block in _blocks(trunk)]
    return [(conv, norm) for conv, norm in pairs if isinstance(norm, nn.BatchNorm2d)]
