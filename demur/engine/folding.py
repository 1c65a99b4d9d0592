"""A net in eval mode with batch norm worked into its weights.

Batch norm that stands still is a scale and a shift of each channel: behind a convolution the
scale goes into its weights, elsewhere both become one multiplication and one addition.
"""

import torch
from torch import Tensor, nn

from demur.engine.copies import ModelCopy, copy_tensors
from demur.nets import RejectingNet
from demur.nets.block import Block
from demur.precision import Precision


class Affine(nn.Module):
    """A scale and a shift of each channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        for name in ("scale", "shift"):
            self.register_buffer(name, norm.weight.detach()[:, None, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        """The scaled and shifted maps."""
        return x * self.scale + self.shift


class Shift(nn.Module):
    """A shift of each channel."""

    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.register_buffer("shift", norm.bias.detach()[:, None, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        """The shifted maps."""
        return x + self.shift


class FoldedCopy(ModelCopy):
    """A copy that answers as its source does in eval mode."""

    def __init__(self, source: RejectingNet, precision: Precision) -> None:
        super().__init__(source, False, precision)
        self.folds: list[tuple[nn.Conv2d, nn.BatchNorm2d, nn.Conv2d, Shift]] = []
        self.affines: list[tuple[nn.BatchNorm2d, Affine]] = []
        self.casts: list[tuple[Tensor, Tensor]] = []
        behind = {id(block.norm2) for block in source.modules() if isinstance(block, Block)}
        for name, module in source.named_modules():
            if isinstance(module, Block) and isinstance(module.norm2, nn.BatchNorm2d):
                twin = self.net.get_submodule(name)
                assert isinstance(twin, Block)
                twin.norm2 = Shift(module.norm2)
                self.folds.append((module.conv1, module.norm2, twin.conv1, twin.norm2))
            elif isinstance(module, nn.BatchNorm2d) and id(module) not in behind:
                affine = Affine(module)
                replace_module(self.net, name, affine)
                self.affines.append((module, affine))
        self._hold(source)
        self.refresh()

    def _hold(self, source: RejectingNet) -> None:
        """Whatever is not folded is copied as it is."""
        folded = {id(conv.weight) for conv, *_ in self.folds}
        held = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        given = dict(source.named_parameters()) | dict(source.named_buffers())
        self.casts = [
            (held[name], value)
            for name, value in given.items()
            if name in held and id(value) not in folded
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the source's weights and statistics as they are now."""
        norms = [norm for _, norm, _, _ in self.folds] + [norm for norm, _ in self.affines]
        scales, shifts = scales_and_shifts(norms)
        for (conv, _, twin, _), scale in zip(self.folds, scales, strict=False):
            twin.weight.copy_(conv.weight * scale[:, None, None, None])
        count = len(self.folds)
        shifted = [behind.shift for *_, behind in self.folds]
        shifted += [affine.shift for _, affine in self.affines]
        held = [*shifted, *(affine.scale for _, affine in self.affines)]
        given = [value[:, None, None] for value in (*shifts, *scales[count:])]
        held += [own for own, _ in self.casts]
        given += [value for _, value in self.casts]
        copy_tensors(held, given)


def scales_and_shifts(norms: list[nn.BatchNorm2d]) -> tuple[list[Tensor], list[Tensor]]:
    """What each batch norm in eval mode does to its channels; few launches for all of them."""
    means = [norm.get_buffer("running_mean") for norm in norms]
    variances = torch._foreach_add(
        [norm.get_buffer("running_var") for norm in norms], [norm.eps for norm in norms]
    )
    scales = torch._foreach_mul(torch._foreach_rsqrt(variances), [n.weight.detach() for n in norms])
    moved = torch._foreach_mul(means, scales)
    return list(scales), list(torch._foreach_sub([norm.bias.detach() for norm in norms], moved))


def replace_module(net: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another."""
    above, _, last = name.rpartition(".")
    setattr(net.get_submodule(above), last, module)
