"""Residual nets on a GPU with batch norm, ReLU and residual sums by our own kernels.

Convolutions are the library's. Only the ends are compiled, the image side and the answer side, so
a step is ready in seconds; the fused_trunk is recorded into its graph.
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
    judged,
)
from demur.engine.deferred_stats import DeferredBatchNormStats
from demur.engine.fused_trunk import FusedTrunk, batch_norms_of, convolutions_of
from demur.gradient import ObjectiveFunction
from demur.methods.batch_norm_mode import running_stats_frozen
from demur.nets import RejectingNet
from demur.nets.block import ResidualTrunk, pooled
from demur.output import Output
from demur.precision import Precision, autocast, no_autocast, products_dtype


def fused_supported(net: RejectingNet, precision: Precision) -> bool:
    """Whether the kernels can serve a net here; fp64 is beyond them."""
    on_gpu = next(net.parameters()).is_cuda and norm_kernels.AVAILABLE
    usual = isinstance(net.trunk, ResidualTrunk) and not net.frozen
    whole = getattr(
        net.aux, "needs_all_stages", False
    )  # only the last one comes out of the fused_trunk
    return on_gpu and precision != "fp64" and usual and not whole


def compiler_for_attacks(net: RejectingNet, precision: Precision) -> Compiler:
    """What pays for attacks on a trained net, which come with many goals and batch sizes.

    Where our kernels serve the net only its two ends are left to compile, and that would be done
    for every goal and size anew: it takes longer than it ever saves.
    """
    return "none" if fused_supported(net, precision) else "inductor"


class FusedResNet(ModelCopy):
    """A copy in either mode; in train mode the source's running statistics move.

    Those of the trunk do with every look, those of the heads when looks are remembered.
    """

    def __init__(
        self, source: RejectingNet, train: bool, precision: Precision, compiler: Compiler = "none"
    ) -> None:
        super().__init__(source, train, precision)
        self.fused_trunk = FusedTrunk(self.net.trunk, source.trunk, train, compiler=compiler)
        self.ends = StemAndHead(self.net, precision)
        self._share_heads()
        self.memory = DeferredBatchNormStats(self.net.aux, compiler) if train else None
        by_kernels = {id(w) for norm in batch_norms_of(source.trunk) for w in norm.parameters()}
        by_kernels |= {id(conv.weight) for conv, _ in self.fused_trunk.folds}
        twins = zip(self.net.trunk.parameters(), source.trunk.parameters(), strict=True)
        self.pairs: list[tuple[Tensor, Tensor]]
        self.pairs = [(twin, own) for twin, own in twins if id(own) not in by_kernels]
        self.refresh()

    def _share_heads(self) -> None:
        """Let the heads be the source's own tensors, which keep their places while it learns."""
        for name, module in self.source.named_modules():
            if name.split(".")[0] in ("classify", "aux"):
                twin = self.net.get_submodule(name)
                twin._buffers = module._buffers
                for mine, own in zip(twin.parameters(False), module.parameters(False), strict=True):
                    mine.data = own.data

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the source's weights, and in eval mode its statistics, as they are now.

        Looks that nobody asked to remember go: what made them has failed.
        """
        if self.memory is not None:
            self.memory.forget()
        held, inputs = [twin for twin, _ in self.pairs], [own for _, own in self.pairs]
        if not self.fused_trunk.train:
            places, values = self.fused_trunk.settle()
            held, inputs = held + places, inputs + values
        copy_tensors(held, inputs)
        self.fused_trunk.turn()

    def remember(self) -> None:
        """Let the head's norms take in what has been looked at."""
        if self.memory is not None:
            self.memory.take_in()

    def answer(self, x: Tensor) -> Output:
        """What the copy makes of images."""
        self.remember()
        with autocast(self.precision, x.device):
            maps = self.fused_trunk(self.ends.opened(x))
        with no_autocast(x.device):
            return self.ends.closed(maps)

    def objective_forward(
        self, objective: ObjectiveFunction, compiler: Compiler, skip_aux: bool = False
    ) -> ObjectiveForward:
        """One look at images: the goal's sum, its values, and the output, `bare` without aux."""
        opened = compile_function(self.ends.opened, compiler)

        def closed(maps: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Output]:
            return judged(objective(out := self.ends.closed(maps), y, *inputs), out, skip_aux)

        ended = compile_function(closed, compiler)

        def looked(x: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Output]:
            with autocast(self.precision, x.device):
                maps = self.fused_trunk(opened(x))
            with no_autocast(x.device):  # outside what is compiled, so that its backward is too
                return self._remembered(ended, maps, y, *inputs)

        return looked

    def _remembered(
        self, ended: ObjectiveForward, *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Output]:
        """What a look ends with, in train mode kept for the norms that remember it later."""
        if self.memory is None:
            return ended(*inputs)
        with running_stats_frozen(self.net.aux):
            total, value, out = ended(*inputs)
        self.memory.see(out.feature)
        return total, value, out


class FusedTrainingNet(nn.Module):
    """The learner's net itself in train mode, made quick; its weights get gradients."""

    def __init__(self, net: RejectingNet, precision: Precision, compiler: Compiler) -> None:
        super().__init__()
        self.precision = precision
        casts = CastWeights(convolutions_of(net.trunk), products_dtype(precision))
        self.fused_trunk = FusedTrunk(net.trunk, net.trunk, train=True, casts=casts)
        ends = StemAndHead(net, precision)
        self.opened = compile_function(ends.opened, compiler)
        self.closed = compile_function(ends.closed, compiler)

    def forward(self, x: Tensor) -> Output:
        """Logits, the last pooled feature, and the auxiliary output."""
        with autocast(self.precision, x.device):
            maps = self.fused_trunk(self.opened(x))
        with no_autocast(x.device):
            return self.closed(maps)


class StemAndHead:
    """What comes before and behind the fused_trunk of a net."""

    def __init__(self, net: RejectingNet, precision: Precision) -> None:
        assert isinstance(net.trunk, ResidualTrunk)
        self.net, self.stem, self.precision = net, net.trunk.stem, precision

    def opened(self, x: Tensor) -> Tensor:
        """From images to the first maps."""
        with autocast(self.precision, x.device):
            maps: Tensor = self.stem(self.net.normalise(x))
        return maps

    def closed(self, maps: Tensor) -> Output:
        """From the last active maps to the answer."""
        feature = pooled(maps)
        return Output(self.net.classify(feature), feature, self.net.aux([feature]))
