"""Residual nets on a GPU with batch norm, ReLU and residual sums by our own kernels.

Convolutions are the library's. Only the ends are compiled, the image side and the answer side, so
a step is ready in seconds; the middle is recorded into its graph.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from demur.engine import norm_kernels
from demur.engine.casts import Casts
from demur.engine.copies import Compiler, Copy, Look, compiled, copy_into, judged
from demur.engine.folding import scales_and_shifts
from demur.engine.halves import Convolution, FoldedHalf, Half
from demur.engine.memory import Memory
from demur.engine.quick_norm import QuickNorm
from demur.engine.still import StillConv
from demur.gradient import GoalFunction
from demur.methods.crafting import statistics_held
from demur.nets import RejectingNet
from demur.nets.block import Block, ResidualTrunk, pooled
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


class Middle:
    """The trunk between its first and last maps: its convolutions, the source's norms.

    Where it learns its convolutions are `casts`, and their weights and the norms' get gradients.
    """

    def __init__(
        self, trunk: nn.Module, source: nn.Module, train: bool,
        still: bool = False, casts: Casts | None = None,
    ) -> None:  # fmt: skip
        norms, twins, self.blocks = _norms(source), _norms(trunk), _blocks(trunk)
        self.train, self.casts = train, casts
        self.sizes = [4 * norm.num_features for norm in norms]
        self.sums = torch.zeros(sum(self.sizes), device=norms[0].weight.device)
        quick = [
            QuickNorm(norm, twin, part.view(2, 2, -1), train, learn=casts is not None)
            for norm, twin, part in zip(norms, twins, self.sums.split(self.sizes), strict=True)
        ]
        self.opening, self.last, within = quick[:-1:2], quick[-1], quick[1::2]  # of each block
        self.folded = [] if train else [FoldedHalf(block, still) for block in self.blocks]
        self.halves: list[Half | FoldedHalf] = [*self.folded]
        if train:
            self.halves = [
                Half(self._of(block.conv1), block.shortcut and self._of(block.shortcut), norm)
                for block, norm in zip(self.blocks, within, strict=True)
            ]
        self.seconds: list[StillConv | Convolution] = [
            StillConv(block.conv2) if still and not train else self._of(block.conv2)
            for block in self.blocks
        ]
        self.norms = quick if train else [*self.opening, self.last]
        self.folds = [] if train else _folds(source)

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

    def _of(self, conv: nn.Conv2d) -> Convolution:
        return conv if self.casts is None else self.casts[conv]

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

    def turn(self) -> None:
        """Follow weights that have changed where they are kept turned as well."""
        weights = [half.weight for half in self.folded]
        weights += [conv.weight for conv in self.seconds if isinstance(conv, StillConv)]
        for weight in weights:
            weight.turn()


class Quick(Copy):
    """A copy in either mode; in train mode the source's running statistics move.

    Of a `still` source, one that learns no more, weights are kept in the way that suits attacks.
    """

    def __init__(
        self, source: RejectingNet, train: bool, precision: Precision, still: bool,
        compiler: Compiler = "none",
    ) -> None:  # fmt: skip
        super().__init__(source, train, precision)
        self.middle = Middle(self.net.trunk, source.trunk, train, still)
        self.ends = Ends(self.net, precision)
        self._share_heads()
        self.memory = Memory(self.net.aux, compiler) if train else None
        by_kernels = {id(w) for norm in _norms(source.trunk) for w in norm.parameters()}
        by_kernels |= {id(conv.weight) for conv, _ in self.middle.folds}
        twins = zip(self.net.trunk.parameters(), source.trunk.parameters(), strict=True)
        self.pairs: list[tuple[Tensor, Tensor]]
        self.pairs = [(twin, own) for twin, own in twins if id(own) not in by_kernels]
        self.refresh()

    def _share_heads(self) -> None:
        """Let the heads, whose arithmetic is the source's, be the source's own tensors."""
        for name, module in self.source.named_modules():
            if name.split(".")[0] in ("classify", "aux"):
                twin = self.net.get_submodule(name)
                twin._buffers = module._buffers
                for mine, own in zip(twin.parameters(False), module.parameters(False), strict=True):
                    mine.data = own.data

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the source's weights, and in eval mode its statistics, as they are now."""
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
        casts = Casts(_convolutions(net.trunk), products_dtype(precision))
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


def _norms(trunk: nn.Module) -> list[nn.BatchNorm2d]:
    """Two of each block, and the last one."""
    return [module for module in trunk.modules() if isinstance(module, nn.BatchNorm2d)]


def _blocks(trunk: nn.Module) -> list[Block]:
    return [module for module in trunk.modules() if isinstance(module, Block)]


def _convolutions(trunk: nn.Module) -> list[nn.Conv2d]:
    """Those of all blocks."""
    blocks = _blocks(trunk)
    return [part for block in blocks for part in block.modules() if isinstance(part, nn.Conv2d)]


def _folds(trunk: nn.Module) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """The convolutions of a trunk that take the norm behind them in."""
    pairs = [(block.conv1, block.norm2) for block in _blocks(trunk)]
    return [(conv, norm) for conv, norm in pairs if isinstance(norm, nn.BatchNorm2d)]
