"""Copies of a net for attacks: frozen weights in the dtype of the attack's convolutions.

The copy computes no weight gradients, and its weights are cast once. `refresh` copies the weights
again after a training step. The running statistics are those of the net.
"""

import copy
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from demur.attacks.attack_model import Gradient, ObjectiveFunction
from demur.nets import RejectingNet
from demur.numerics import Precision, autocast, no_autocast, products_dtype
from demur.output import Output

P = ParamSpec("P")
R = TypeVar("R")
Compiler = Literal["inductor", "aot_eager", "none"]
ObjectiveForward = Callable[..., tuple[Tensor, Tensor, Output]]  # of x, y, *inputs
Query = Literal["gradient", "gradients", "gradient_only", "value"]
QueryFunction = Callable[..., Gradient]  # of objective, query, x, y, *inputs


class ModelCopy:
    """A copy of `source` in train or eval mode, with the source's running statistics."""

    def __init__(self, source: RejectingNet, train: bool, precision: Precision) -> None:
        self.source, self.precision = source, precision
        self.net = copy.deepcopy(source).requires_grad_(False).train(train)
        on_gpu = next(source.parameters()).is_cuda
        layout = torch.channels_last if on_gpu else torch.preserve_format
        for name, module in source.named_modules():
            own = self.net.get_submodule(name)
            own._buffers = module._buffers
            if isinstance(own, nn.Conv2d):
                weight = own.weight.data.to(products_dtype(precision), memory_format=layout)
                own.weight.data = weight

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the source."""
        torch._foreach_copy_(list(self.net.parameters()), list(self.source.parameters()))

    def forward(self, x: Tensor) -> Output:
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
    aux = out.logits.new_zeros(len(out.logits), 0) if skip_aux else out.aux
    shown = Output(out.logits, out.feature, aux)  # torch 2.8 cannot compile out._replace
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
