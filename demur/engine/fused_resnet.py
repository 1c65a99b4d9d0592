"""Residual nets on a GPU with batch norm, ReLU and residual sums in Triton kernels.

Convolutions are those of cuDNN. torch.compile compiles only the stem and the head, so a step is
ready in seconds; the trunk runs eagerly and is captured into the CUDA graph of its caller. Every
layer computes the formulas of the plain net, so results agree up to rounding.
"""

import torch
from torch import Tensor, nn

from demur.engine import norm_kernels
from demur.engine.cast_weights import CastWeights
from demur.engine.copies import (
    Compiler,
    ModelCopy,
    ObjectiveForward,
    compile_function,
    copy_tensors,
    query_result,
)
from demur.engine.deferred_stats import DeferredBatchNormStats
from demur.engine.fused_trunk import FusedTrunk, batch_norms_of, convolutions_of
from demur.gradient import ObjectiveFunction
from demur.methods.batch_norm_mode import running_stats_frozen
from demur.nets import RejectingNet
from demur.nets.block import ResidualTrunk, global_average_pool
from demur.output import Output
from demur.precision import Precision, autocast, no_autocast, products_dtype


def fused_supported(net: RejectingNet, precision: Precision) -> bool:
    """Return whether the kernels can compute this net on its device; they have no fp64."""
    on_gpu = next(net.parameters()).is_cuda and norm_kernels.AVAILABLE
    usual = isinstance(net.trunk, ResidualTrunk) and not net.frozen
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
