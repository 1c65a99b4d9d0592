"""Copies of a net for attacks: frozen weights in the dtype of the attack's convolutions.

    model = TrainModeCopy(net, "bf16")      # running statistics are those of `net`
    total, value, out = model.objective_forward(objective, "inductor")(x, y)

The copy computes no weight gradients, and its weights are cast once, not in every forward pass.
`refresh` copies the weights again after a training step, so outputs and input gradients are those
of the net. `FrozenModel` chooses the kind of copy.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from demur.attacks.attack_model import Gradient, ObjectiveFunction
from demur.nets import RejectingNet
from demur.nets.resnet import Block
from demur.numerics import Precision, autocast, no_autocast, products_dtype
from demur.output import Output

P = ParamSpec("P")
R = TypeVar("R")
Compiler = Literal["inductor", "aot_eager", "none"]
ObjectiveForward = Callable[..., tuple[Tensor, Tensor, Output]]  # of x, y, *inputs
Query = Literal["gradient", "gradients", "gradient_only", "value"]
QueryFunction = Callable[..., Gradient]  # of objective, query, x, y, *inputs


class ModelCopy(ABC):
    """A copy of `source` in train or eval mode."""

    def __init__(self, source: RejectingNet, train: bool, precision: Precision) -> None:
        self.source, self.precision = source, precision
        self.net = copy.deepcopy(source).requires_grad_(False).train(train)
        on_gpu = next(source.parameters()).is_cuda
        layout = torch.channels_last if on_gpu else torch.preserve_format
        for module in self.net.modules():
            if isinstance(module, nn.Conv2d):
                weight = module.weight.data.to(products_dtype(precision), memory_format=layout)
                module.weight.data = weight

    @abstractmethod
    def refresh(self) -> None:
        """Copy the current weights of the source."""

    def forward(self, x: Tensor) -> Output:
        """Return the output for images of shape N, C, H, W."""
        with autocast(self.precision, x.device):
            out: Output = self.net(x)
        return out

    def objective_forward(
        self, objective: ObjectiveFunction, compiler: Compiler, skip_aux: bool = False
    ) -> ObjectiveForward:
        """Return a compiled function of (x, y, *inputs) for one gradient query.

        It returns the sum of the objective, differentiable in x, the objective of each image (N),
        and the output. `skip_aux` leaves the auxiliary output empty.
        """

        def forward(x: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Output]:
            return query_result(objective(out := self.forward(x), y, *inputs), out, skip_aux)

        return compile_function(forward, compiler)


class TrainModeCopy(ModelCopy):
    """A copy in train mode with its own weights but the source's running statistics."""

    def __init__(self, source: RejectingNet, precision: Precision) -> None:
        super().__init__(source, True, precision)
        for name, module in source.named_modules():
            self.net.get_submodule(name)._buffers = module._buffers
        self.pairs = list(zip(self.net.parameters(), source.parameters(), strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        torch._foreach_copy_(
            [copied for copied, _ in self.pairs], [weight for _, weight in self.pairs]
        )


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
    """A copy in eval mode with batch norm folded into its weights.

    In eval mode batch norm is an affine map of each channel. After a convolution its scale is
    folded into the convolution's weight and only a shift remains; elsewhere it becomes one
    multiplication and one addition. Outputs equal those of the source up to rounding.
    """

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
        torch._foreach_copy_(targets, values)


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


def query_result(value: Tensor, out: Output, skip_aux: bool) -> tuple[Tensor, Tensor, Output]:
    """Return the sum, the values and the output of a gradient query; only the sum has a graph.

    For values of several objectives, N, M, there are M sums.
    With `skip_aux` the auxiliary output is a new tensor of width 0. A slice of width 0 would keep
    the auxiliary head in the compiled graph.
    """
    shown = out._replace(aux=out.logits.new_zeros(len(out.logits), 0)) if skip_aux else out
    return value.sum(0), value.detach(), shown.detached()


def input_gradient(total: Tensor, x: Tensor, query: Query) -> Tensor:
    """Return the gradient that a query asks for: of one sum, of several (N, M, ...), or none."""
    if query == "value":
        return x[:, :0]
    with no_autocast(x.device):
        if query == "gradients":
            sums = total.unbind()
            return torch.stack(
                [torch.autograd.grad(part, x, retain_graph=True)[0] for part in sums], 1
            )
        (grad,) = torch.autograd.grad(total, x)
        return grad


def compile_function(function: Callable[P, R], compiler: Compiler) -> Callable[P, R]:
    """Return the function compiled for static shapes, or unchanged if the compiler is "none"."""
    if compiler == "none":
        return function

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    # torch.compile keeps at most eight versions of a code object: each function gets its own
    wrapper.__code__ = wrapper.__code__.replace()
    compiled: Callable[P, R] = torch.compile(
        wrapper, dynamic=False, fullgraph=True, backend=compiler
    )
    return compiled
