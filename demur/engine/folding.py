"""A copy of a net in eval mode with batch norm folded into its weights.

In eval mode batch norm is an affine map of each channel. After a convolution its scale is folded
into the convolution's weight and only a shift remains; elsewhere it becomes one multiplication
and one addition. This reassociates products, so outputs equal those of the net up to rounding.
"""

import torch
from torch import Tensor, nn

from demur.engine.copies import ModelCopy, copy_tensors
from demur.nets import RejectingNet
from demur.nets.block import Block
from demur.precision import Precision


class Affine(nn.Module):
    """Scale and shift each channel of maps N, C, H, W."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        for name in ("scale", "shift"):
            self.register_buffer(name, norm.weight.detach()[:, None, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Shift(nn.Module):
    """Shift each channel of maps N, C, H, W."""

    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.register_buffer("shift", norm.bias.detach()[:, None, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class FoldedCopy(ModelCopy):
    """A copy with folded batch norm; its outputs are those of the source in eval mode."""

    def __init__(self, source: RejectingNet, precision: Precision) -> None:
        super().__init__(source, False, precision)
        self.folds: list[tuple[nn.Conv2d, nn.BatchNorm2d, nn.Conv2d, Shift]] = []
        self.affines: list[tuple[nn.BatchNorm2d, Affine]] = []
        self.plain_copies: list[tuple[Tensor, Tensor]] = []  # (tensor of the copy, of the source)
        after_conv = {id(block.norm2) for block in source.modules() if isinstance(block, Block)}
        for name, module in source.named_modules():
            if isinstance(module, Block) and isinstance(module.norm2, nn.BatchNorm2d):
                block = self.net.get_submodule(name)
                assert isinstance(block, Block)
                block.norm2 = Shift(module.norm2)
                self.folds.append((module.conv1, module.norm2, block.conv1, block.norm2))
            elif isinstance(module, nn.BatchNorm2d) and id(module) not in after_conv:
                affine = Affine(module)
                replace_module(self.net, name, affine)
                self.affines.append((module, affine))
        self._pair_unfolded(source)
        self.refresh()

    def _pair_unfolded(self, source: RejectingNet) -> None:
        """Pair every tensor that is not folded with its source."""
        folded = {id(conv.weight) for conv, *_ in self.folds}
        own = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        given = dict(source.named_parameters()) | dict(source.named_buffers())
        self.plain_copies = [
            (own[name], value)
            for name, value in given.items()
            if name in own and id(value) not in folded
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        norms = [norm for _, norm, _, _ in self.folds] + [norm for norm, _ in self.affines]
        scales, shifts = scales_and_shifts(norms)
        for (conv, _, folded_conv, _), scale in zip(self.folds, scales, strict=False):
            folded_conv.weight.copy_(conv.weight * scale[:, None, None, None])
        count = len(self.folds)
        shift_buffers = [module.shift for *_, module in self.folds]
        shift_buffers += [affine.shift for _, affine in self.affines]
        targets = [*shift_buffers, *(affine.scale for _, affine in self.affines)]
        values = [value[:, None, None] for value in (*shifts, *scales[count:])]
        targets += [own for own, _ in self.plain_copies]
        values += [value for _, value in self.plain_copies]
        copy_tensors(targets, values)


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


def replace_module(net: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of this name."""
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)
