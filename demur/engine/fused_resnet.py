"""Residual nets on a GPU with batch norm, ReLU and residual sums in Triton kernels.

torch.compile compiles only the stem and the head, so a step is ready in seconds; the trunk runs
eagerly and is captured into the CUDA graph of its caller. Results agree with the plain net up to
rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, relu

from demur.attacks.attack_model import ObjectiveFunction
from demur.engine import fused_norm
from demur.engine.copies import (
    Compiler,
    ModelCopy,
    ObjectiveForward,
    compile_function,
    query_result,
)
from demur.engine.fused_norm import FusedBatchNorm
from demur.nets import RejectingNet
from demur.nets.architectures import Block, ResidualTrunk, global_average_pool
from demur.numerics import Precision, autocast, no_autocast
from demur.output import Output


def fused_supported(net: RejectingNet, precision: Precision) -> bool:
    """Return whether the kernels can compute this net on its device; they have no fp64."""
    on_gpu = next(net.parameters()).is_cuda and fused_norm.AVAILABLE
    usual = isinstance(net.trunk, ResidualTrunk) and not net.frozen and not net.trunk.large
    usual = usual and net.trunk.activation == "relu"
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
    """A fused copy in either mode; train mode updates the running statistics of the source."""

    def __init__(self, source: RejectingNet, train: bool, precision: Precision) -> None:
        super().__init__(source, train, precision)
        self.fused_trunk = FusedTrunk(self.net.trunk, source.trunk, train)
        self.stem_and_head = StemAndHead(self.net, precision)
        for name in ("classify", "aux"):  # the source's own tensors; training updates them in place
            own, shared = self.net.get_submodule(name), source.get_submodule(name)
            for parameter, weight in zip(own.parameters(), shared.parameters(), strict=True):
                parameter.data = weight.data
        # batch norms are read from the source; folded weights are written by eval_constants
        not_copied = {id(w) for norm in batch_norms_of(source.trunk) for w in norm.parameters()}
        not_copied |= {id(conv.weight) for conv, _ in self.fused_trunk.folds}
        pairs = zip(self.net.trunk.parameters(), source.trunk.parameters(), strict=True)
        self.pairs: list[tuple[Tensor, Tensor]]
        self.pairs = [(own, weight) for own, weight in pairs if id(weight) not in not_copied]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the source and, in eval mode, its running statistics."""
        targets, values = [own for own, _ in self.pairs], [weight for _, weight in self.pairs]
        if not self.fused_trunk.train:
            buffers, constants = self.fused_trunk.eval_constants()
            targets, values = targets + buffers, values + constants
        torch._foreach_copy_(targets, values)

    def forward(self, x: Tensor) -> Output:
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
                return compiled_head(maps, y, *inputs)

        return forward


class FusedTrainingNet(nn.Module):
    """The net under training itself in train mode, with fused layers and weight gradients."""

    def __init__(self, net: RejectingNet, precision: Precision, compiler: Compiler) -> None:
        super().__init__()
        self.precision = precision
        self.fused_trunk = FusedTrunk(net.trunk, net.trunk, train=True, learn=True)
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
        with autocast(self.precision, x.device):
            maps: Tensor = self.stem_conv(self.net.normalise(x))
        return maps

    def head(self, maps: Tensor) -> Output:
        feature = global_average_pool(maps)
        return Output(self.net.classify(feature), feature, self.net.aux([feature]))


class ConvNorm:
    """The first convolution of a block, its batch norm in train mode and ReLU."""

    def __init__(self, conv: nn.Conv2d, norm: FusedBatchNorm) -> None:
        self.conv, self.norm = conv, norm

    def __call__(self, active: Tensor) -> Tensor:
        return self.norm(convolve(self.conv, active))[1]


class FoldedConv:
    """The same in eval mode, with frozen weights and batch norm folded into the convolution.

    cuDNN adds the shift and applies ReLU in the kernel of the convolution, so the feature maps are
    written once. The caller writes `weight` and `shift` in place, once or after each training step.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        self.weight, self.stride = conv.weight.detach(), conv.stride[0]
        self.shift = conv.weight.new_zeros(len(conv.weight))

    def __call__(self, active: Tensor) -> Tensor:
        hidden: Tensor = _ConvReLU.apply(active, self.weight, self.shift, self.stride)  # type: ignore[no-untyped-call]
        return hidden


class _ConvReLU(torch.autograd.Function):
    """ReLU(conv3x3(active) + shift), with a gradient for `active` only."""

    @staticmethod
    def forward(ctx: Any, active: Tensor, weight: Tensor, shift: Tensor, stride: int) -> Tensor:
        if active.is_cuda:
            hidden: Tensor = torch.cudnn_convolution_relu(
                active, weight, shift, [stride, stride], [1, 1], [1, 1], 1
            )
        else:
            hidden = relu(conv2d(active, weight, shift, stride, padding=1))
        ctx.save_for_backward(active, weight, hidden)
        ctx.stride = stride
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        active, weight, hidden = ctx.saved_tensors
        grad_maps = torch.ops.aten.threshold_backward(grads[0], hidden, 0)
        grad_active, _, _ = torch.ops.aten.convolution_backward(
            grad_maps, active, weight, None, [ctx.stride] * 2, [1, 1], [1, 1], False, [0, 0], 1,
            [True, False, False],
        )  # fmt: skip
        return grad_active, None, None, None


class FusedTrunk:
    """The residual blocks from the output of the stem to the last active maps.

    The convolutions are those of `trunk`, a copy, or the source itself in training; the batch norms
    are those of `source`. Each block's residual sum is computed by the kernel of the next batch
    norm, so no sum is written and read again. Unless weights `learn`, the trunk computes input
    gradients only; in eval mode it folds every second batch norm.
    """

    def __init__(
        self, trunk: nn.Module, source: nn.Module, train: bool, learn: bool = False
    ) -> None:
        norms, own_norms = batch_norms_of(source), batch_norms_of(trunk)
        self.blocks, self.train, self.learn = _blocks(trunk), train, learn
        self.sizes = [4 * norm.num_features for norm in norms]
        self.sums = torch.zeros(sum(self.sizes), device=norms[0].weight.device)
        sums = self.sums.split(self.sizes)
        fused_norms = [
            FusedBatchNorm(norm, own, part.view(2, 2, -1), train, learn)
            for norm, own, part in zip(norms, own_norms, sums, strict=True)
        ]
        # norm1 and norm2 of each block, then the norm after the last block
        self.first_norms, self.last_norm = fused_norms[:-1:2], fused_norms[-1]
        self.folded = [] if train else [FoldedConv(block.conv1) for block in self.blocks]
        self.halves: list[ConvNorm | FoldedConv] = [*self.folded]
        if train:
            pairs = zip(self.blocks, fused_norms[1::2], strict=True)
            self.halves = [ConvNorm(block.conv1, norm) for block, norm in pairs]
        self.norms = fused_norms if train else [*self.first_norms, self.last_norm]
        # each convolution with the batch norm that is folded into it
        self.folds = [] if train else [(b.conv1, b.norm2) for b in _blocks(source)]

    def __call__(self, maps: Tensor) -> Tensor:
        self._prepare_buffers()
        skip: Tensor | None = None  # added by the first norm of the next block
        for block, norm, half in zip(self.blocks, self.first_norms, self.halves, strict=True):
            maps, skip = run_block(block, norm, half, maps, skip)
        return self.last_norm(maps, skip)[1]

    def _prepare_buffers(self) -> None:
        """Zero the sums; allocate new ones in training, where two passes share a backward pass."""
        if self.learn:
            sums, coefficients = torch.zeros_like(self.sums), torch.empty_like(self.sums)
            parts = zip(
                self.norms, coefficients.split(self.sizes), sums.split(self.sizes), strict=True
            )
            for norm, own_coefficients, own_sums in parts:
                norm.set_buffers(own_coefficients.view(4, -1), own_sums.view(2, 2, -1))
        elif self.train:
            self.sums.zero_()
        if self.train and self.last_norm.momentum_norm.momentum != 0:
            counts = [norm.source.get_buffer("num_batches_tracked") for norm in self.norms]
            with torch.no_grad():
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
        buffers += [half.weight for half in self.folded]
        return buffers, [*scales[:unfolded], *shifts, *weights]


def run_block(
    block: Block, norm: FusedBatchNorm, half: ConvNorm | FoldedConv, maps: Tensor,
    skip: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the maps of a block's last convolution and its shortcut, not yet added."""
    total, active = norm(maps, skip)
    skip = total if block.shortcut is None else convolve(block.shortcut, active)
    return convolve(block.conv2, half(active)), skip


def convolve(conv: nn.Conv2d, active: Tensor) -> Tensor:
    """Return the convolution by cuDNN; a net's own classes compute it in other ways."""
    return conv2d(active, conv.weight, stride=conv.stride, padding=conv.padding)


def batch_norms_of(trunk: nn.Module) -> list[nn.BatchNorm2d]:
    """Return two batch norms of each block, then the last one."""
    return [module for module in trunk.modules() if isinstance(module, nn.BatchNorm2d)]


def _blocks(trunk: nn.Module) -> list[Block]:
    return [module for module in trunk.modules() if isinstance(module, Block)]


def scales_and_shifts(norms: list[nn.BatchNorm2d]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the scale and shift (C) of each batch norm in eval mode, with few launches.

    scale = weight / sqrt(running_var + eps), shift = bias - running_mean * scale.
    """
    means = [norm.get_buffer("running_mean") for norm in norms]
    variances = torch._foreach_add(
        [norm.get_buffer("running_var") for norm in norms], [norm.eps for norm in norms]
    )
    scales = torch._foreach_mul(torch._foreach_rsqrt(variances), [n.weight.detach() for n in norms])
    scaled_means = torch._foreach_mul(means, scales)
    biases = [norm.bias.detach() for norm in norms]
    return list(scales), list(torch._foreach_sub(biases, scaled_means))
