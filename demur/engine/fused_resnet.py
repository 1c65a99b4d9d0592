"""Residual nets on a GPU with batch norm, ReLU and residual sums in Triton kernels.

Convolutions are those of cuDNN. torch.compile compiles only the stem and the head, so a step is
ready in seconds; the trunk runs eagerly and is captured into the CUDA graph of its caller. Every
layer computes the formulas of the plain net, so results agree up to rounding.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from demur.engine import fused_norm
from demur.engine.convolutions import (
    CastConv,
    CastWeights,
    FlippedWeights,
    FrozenConv,
    FrozenWeight,
    add_shortcut_gradient,
    fork_convolutions,
)
from demur.engine.copies import (
    Compiler,
    ModelCopy,
    ObjectiveForward,
    compile_function,
    copy_tensors,
    query_result,
    scales_and_shifts,
)
from demur.engine.deferred_stats import DeferredBatchNormStats
from demur.engine.fused_norm import FusedBatchNorm
from demur.gradient import ObjectiveFunction
from demur.methods.batch_norm_mode import running_stats_frozen
from demur.nets import RejectingNet
from demur.nets.block import Block, ResidualTrunk, global_average_pool
from demur.output import Output
from demur.precision import Precision, autocast, no_autocast, products_dtype

Learnable = nn.Conv2d | CastConv
Convolution = Learnable | FrozenConv


def fused_supported(net: RejectingNet, precision: Precision) -> bool:
    """Return whether the kernels can compute this net on its device; they have no fp64."""
    on_gpu = next(net.parameters()).is_cuda and fused_norm.AVAILABLE
    usual = isinstance(net.trunk, ResidualTrunk) and not net.frozen and not net.trunk.large
    # a FusedTrunk returns the maps of the last stage only
    all_stages = getattr(net.aux, "needs_all_stages", False)
    return on_gpu and precision != "fp64" and usual and not all_stages


def compiler_for_attacks(net: RejectingNet, precision: Precision) -> Compiler:
    """Return the compiler for attacks on a trained net.

    With a fused net only stem and head are left to compile, for every objective and batch size
    again. That takes longer than it saves.
    """
    return "none" if fused_supported(net, precision) else "inductor"


class FusedResNet(ModelCopy):
    """A fused copy in either mode; train mode updates the running statistics of the source.

    Those of the trunk change with every forward pass, those of the head in `update_statistics`.
    """

    def __init__(
        self, source: RejectingNet, train: bool, precision: Precision, compiler: Compiler = "none"
    ) -> None:
        super().__init__(source, train, precision)
        self.fused_trunk = FusedTrunk(self.net.trunk, source.trunk, train, compiler=compiler)
        self.stem_and_head = StemAndHead(self.net, precision)
        self._share_heads()
        self.deferred_stats = DeferredBatchNormStats(self.net.aux, compiler) if train else None
        # batch norms are read from the source; folded weights are written by eval_constants
        not_copied = {id(w) for norm in batch_norms_of(source.trunk) for w in norm.parameters()}
        not_copied |= {id(conv.weight) for conv, _ in self.fused_trunk.folds}
        pairs = zip(self.net.trunk.parameters(), source.trunk.parameters(), strict=True)
        self.pairs: list[tuple[Tensor, Tensor]]
        self.pairs = [(own, weight) for own, weight in pairs if id(weight) not in not_copied]
        self.refresh()

    def _share_heads(self) -> None:
        """Use the source's own tensors for the heads; training updates them in place."""
        for name, module in self.source.named_modules():
            if name.split(".")[0] in ("classify", "aux"):
                own = self.net.get_submodule(name)
                own._buffers = module._buffers
                parameters = zip(own.parameters(False), module.parameters(False), strict=True)
                for parameter, shared in parameters:
                    parameter.data = shared.data

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the source and, in eval mode, its running statistics.

        This drops pending statistics, which are left over only if an attack failed.
        """
        if self.deferred_stats is not None:
            self.deferred_stats.clear()
        targets, values = [own for own, _ in self.pairs], [weight for _, weight in self.pairs]
        if not self.fused_trunk.train:
            buffers, constants = self.fused_trunk.eval_constants()
            targets, values = targets + buffers, values + constants
        copy_tensors(targets, values)
        self.fused_trunk.update_flipped()

    def update_statistics(self) -> None:
        """Apply the deferred updates of the head's running statistics."""
        if self.deferred_stats is not None:
            self.deferred_stats.update()

    def forward(self, x: Tensor) -> Output:
        self.update_statistics()
        with autocast(self.precision, x.device):
            maps = self.fused_trunk(self.stem_and_head.stem(x))
        with no_autocast(x.device):
            return self.stem_and_head.head(maps)

    def objective_forward(
        self, objective: ObjectiveFunction, compiler: Compiler, skip_aux: bool = False
    ) -> ObjectiveForward:
        stem = compile_function(self.stem_and_head.stem, compiler)

        def head(maps: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Output]:
            out = self.stem_and_head.head(maps)
            return query_result(objective(out, y, *inputs), out, skip_aux)

        compiled_head = compile_function(head, compiler)

        def forward(x: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Output]:
            with autocast(self.precision, x.device):
                maps = self.fused_trunk(stem(x))
            with no_autocast(x.device):  # outside of the compiled code, to cover its backward too
                return self._run_head(compiled_head, maps, y, *inputs)

        return forward

    def _run_head(self, head: ObjectiveForward, *inputs: Tensor) -> tuple[Tensor, Tensor, Output]:
        """Run the head; in train mode defer the update of its running statistics."""
        if self.deferred_stats is None:
            return head(*inputs)
        with running_stats_frozen(self.net.aux):
            total, value, out = head(*inputs)
        self.deferred_stats.add(out.feature)
        return total, value, out


class FusedTrainingNet(nn.Module):
    """The net under training itself in train mode, with fused layers and weight gradients."""

    def __init__(self, net: RejectingNet, precision: Precision, compiler: Compiler) -> None:
        super().__init__()
        self.precision = precision
        casts = CastWeights(convolutions_of(net.trunk), products_dtype(precision))
        self.fused_trunk = FusedTrunk(net.trunk, net.trunk, train=True, casts=casts)
        stem_and_head = StemAndHead(net, precision)
        self.stem = compile_function(stem_and_head.stem, compiler)
        self.head = compile_function(stem_and_head.head, compiler)

    def forward(self, x: Tensor) -> Output:
        with autocast(self.precision, x.device):
            maps = self.fused_trunk(self.stem(x))
        with no_autocast(x.device):
            return self.head(maps)


class StemAndHead:
    """The layers of a net before and after its FusedTrunk."""

    def __init__(self, net: RejectingNet, precision: Precision) -> None:
        assert isinstance(net.trunk, ResidualTrunk)
        self.net, self.stem_conv, self.precision = net, net.trunk.stem, precision

    def stem(self, x: Tensor) -> Tensor:
        """Return the maps after the stem convolution for images N, C, H, W."""
        with autocast(self.precision, x.device):
            maps: Tensor = self.stem_conv(self.net.normalise(x))
        return maps

    def head(self, maps: Tensor) -> Output:
        """Return the output of the net for the last active maps."""
        feature = global_average_pool(maps)
        return Output(self.net.classify(feature), feature, self.net.aux([feature]))


class BlockHalf:
    """Convolution, batch norm and ReLU of a block with an identity shortcut, in train mode."""

    def __init__(self, conv: Convolution, norm: FusedBatchNorm) -> None:
        self.conv, self.norm = conv, norm

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortcut and the hidden maps.

        `total` is the input of the block, `active` is ReLU(norm1(total)).
        """
        return total, self.norm(self.conv(active))[1]


class ForkedBlockHalf:
    """The same for a block whose shortcut is a 1x1 convolution."""

    def __init__(self, conv: Learnable, shortcut: Learnable, norm: FusedBatchNorm) -> None:
        assert shortcut.stride == conv.stride
        self.conv, self.shortcut, self.norm = conv, shortcut, norm

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortcut and the hidden maps."""
        conv, shortcut = self.conv, self.shortcut
        skip, maps = fork_convolutions(active, shortcut.weight, conv.weight, conv.stride[0])
        return skip, self.norm(maps)[1]


class FoldedBlockHalf:
    """The same in eval mode with batch norm folded into the convolution and frozen weights.

    cuDNN adds the shift and applies ReLU in the kernel of the convolution, so the feature maps are
    written once. The caller writes `weight` and `shift` in place, once or after each training step.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.weight = block, FrozenWeight(block.conv1)
        self.shift = block.conv1.weight.new_zeros(len(block.conv1.weight))

    def __call__(self, total: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shortcut and the hidden maps."""
        shortcut = self.block.shortcut
        weight1x1 = None if shortcut is None else shortcut.weight
        skip, hidden = _FoldedHalf.apply(active, self.weight, self.shift, weight1x1)  # type: ignore[no-untyped-call]
        return total if skip is None else skip, hidden


class _FoldedHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, active: Tensor, weight: FrozenWeight, shift: Tensor, weight1x1: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        skip = None if weight1x1 is None else conv2d(active, weight1x1, stride=weight.stride)
        hidden = _conv_relu(active, weight.weight, shift, weight.stride)
        ctx.save_for_backward(active, weight1x1, hidden)
        ctx.weight = weight
        return skip, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        active, weight1x1, hidden = ctx.saved_tensors
        grad_skip, grad_hidden = grads
        grad_maps = torch.ops.aten.threshold_backward(grad_hidden, hidden, 0)
        grad_active = ctx.weight.input_gradient(grad_maps, active)
        if weight1x1 is not None:
            add_shortcut_gradient(grad_active, grad_skip, weight1x1, ctx.weight.stride)
        return grad_active, None, None, None


def _conv_relu(active: Tensor, weight: Tensor, shift: Tensor, stride: int) -> Tensor:
    """Return ReLU(conv3x3(active) + shift)."""
    if active.is_cuda:
        out: Tensor = torch.cudnn_convolution_relu(
            active, weight, shift, [stride, stride], [1, 1], [1, 1], 1
        )
        return out
    return relu(conv2d(active, weight, shift, stride, padding=1))


class FusedTrunk:
    """The residual blocks from the output of the stem to the last active maps.

    Each block's residual sum is computed by the kernel of the next batch norm, so no sum is written
    and read again. With frozen weights the trunk computes input gradients only; in eval mode it
    folds every second batch norm.

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
        buffers = [rows[fused_norm.SCALE] for rows in coefficients]
        buffers += [rows[fused_norm.SHIFT] for rows in coefficients]
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
