"""Residual nets on a GPU with batch norm, ReLU and residual sums by our own kernels.

Convolutions are the library's. Only the ends are compiled, the image side and the answer side, so
a step is ready in seconds; the middle is recorded into its graph.
"""

import torch
from torch import Tensor, nn

from demur.engine import norm_kernels
from demur.engine.casts import Casts
from demur.engine.copies import Compiler, Copy, Look, compiled, copy_into, judged
from demur.engine.memory import Memory
from demur.engine.middle import Middle, convolutions_of, norms_of
from demur.gradient import GoalFunction
from demur.methods.crafting import statistics_held
from demur.nets import RejectingNet
from demur.nets.block import ResidualTrunk, pooled
from demur.output import Output
from demur.precision import Precision, lowered, products_dtype, unlowered


def quick_suits(net: RejectingNet, precision: Precision) -> bool:
    """Whether the kernels can serve a net here; fp64 is beyond them."""
    on_gpu = next(net.parameters()).is_cuda and norm_kernels.AVAILABLE
    usual = isinstance(net.trunk, ResidualTrunk) and not net.frozen
    whole = getattr(net.aux, "needs_all_stages", False)  # only the last one comes out of the middle
    return on_gpu and precision != "fp64" and usual and not whole


def attack_compiler(net: RejectingNet, precision: Precision) -> Compiler:
    """What pays for attacks on a trained net, which come with many goals and batch sizes.

    Where our kernels serve the net only its two ends are left to compile, and that would be done
    for every goal and size anew: it takes longer than it ever saves.
    """
    return "none" if quick_suits(net, precision) else "inductor"


class Quick(Copy):
    """A copy in either mode; in train mode the source's running statistics move.

    Those of the trunk do with every look, those of the heads when looks are remembered.
    """

    def __init__(
        self, source: RejectingNet, train: bool, precision: Precision, compiler: Compiler = "none"
    ) -> None:
        super().__init__(source, train, precision)
        self.middle = Middle(self.net.trunk, source.trunk, train, compiler=compiler)
        self.ends = Ends(self.net, precision)
        self._share_heads()
        self.memory = Memory(self.net.aux, compiler) if train else None
        by_kernels = {id(w) for norm in norms_of(source.trunk) for w in norm.parameters()}
        by_kernels |= {id(conv.weight) for conv, _ in self.middle.folds}
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
        held, given = [twin for twin, _ in self.pairs], [own for _, own in self.pairs]
        if not self.middle.train:
            places, values = self.middle.settle()
            held, given = held + places, given + values
        copy_into(held, given)
        self.middle.turn()

    def remember(self) -> None:
        """Let the head's norms take in what has been looked at."""
        if self.memory is not None:
            self.memory.take_in()

    def answer(self, x: Tensor) -> Output:
        """What the copy makes of images."""
        self.remember()
        with lowered(self.precision, x.device):
            maps = self.middle(self.ends.opened(x))
        with unlowered(x.device):
            return self.ends.closed(maps)

    def look(self, goal: GoalFunction, compiler: Compiler, bare: bool = False) -> Look:
        """One look at images: the goal's sum, its values, and the output, `bare` without aux."""
        opened = compiled(self.ends.opened, compiler)

        def closed(maps: Tensor, y: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Output]:
            return judged(goal(out := self.ends.closed(maps), y, *given), out, bare)

        ended = compiled(closed, compiler)

        def looked(x: Tensor, y: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Output]:
            with lowered(self.precision, x.device):
                maps = self.middle(opened(x))
            with unlowered(x.device):  # outside what is compiled, so that its backward is too
                return self._remembered(ended, maps, y, *given)

        return looked

    def _remembered(self, ended: Look, *given: Tensor) -> tuple[Tensor, Tensor, Output]:
        """What a look ends with, in train mode kept for the norms that remember it later."""
        if self.memory is None:
            return ended(*given)
        with statistics_held(self.net.aux):
            total, value, out = ended(*given)
        self.memory.see(out.feature)
        return total, value, out


class QuickNet(nn.Module):
    """The learner's net itself in train mode, made quick; its weights get gradients."""

    def __init__(self, net: RejectingNet, precision: Precision, compiler: Compiler) -> None:
        super().__init__()
        self.precision = precision
        casts = Casts(convolutions_of(net.trunk), products_dtype(precision))
        self.middle = Middle(net.trunk, net.trunk, train=True, casts=casts)
        ends = Ends(net, precision)
        self.opened = compiled(ends.opened, compiler)
        self.closed = compiled(ends.closed, compiler)

    def forward(self, x: Tensor) -> Output:
        """Logits, the last pooled feature, and the auxiliary output."""
        with lowered(self.precision, x.device):
            maps = self.middle(self.opened(x))
        with unlowered(x.device):
            return self.closed(maps)


class Ends:
    """What comes before and behind the middle of a net."""

    def __init__(self, net: RejectingNet, precision: Precision) -> None:
        assert isinstance(net.trunk, ResidualTrunk)
        self.net, self.stem, self.precision = net, net.trunk.stem, precision

    def opened(self, x: Tensor) -> Tensor:
        """From images to the first maps."""
        with lowered(self.precision, x.device):
            maps: Tensor = self.stem(self.net.normalise(x))
        return maps

    def closed(self, maps: Tensor) -> Output:
        """From the last active maps to the answer."""
        feature = pooled(maps)
        return Output(self.net.classify(feature), feature, self.net.aux([feature]))
