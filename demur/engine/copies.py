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

from demur.gradient import ObjectiveFunction
from demur.nets import RejectingNet
from demur.output import Output
from demur.precision import Precision, autocast, products_dtype

P = ParamSpec("P")
R = TypeVar("R")
Compiler = Literal["inductor", "aot_eager", "none"]
ObjectiveForward = Callable[..., tuple[Tensor, Tensor, Output]]  # of x, y, *inputs


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
        copy_tensors([copied for copied, _ in self.pairs], [weight for _, weight in self.pairs])


def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy sources into targets in place with few launches, whatever their dtypes are.

    One launch copies many tensors only if they agree in both dtypes and in whether the strides
    match; a mixed list would be copied tensor by tensor.
    """
    groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.dtype, source.dtype, target.stride() == source.stride()
        group_targets, group_sources = groups.setdefault(key, ([], []))
        group_targets.append(target)
        group_sources.append(source)
    for group_targets, group_sources in groups.values():
        torch._foreach_copy_(group_targets, group_sources)


def query_result(value: Tensor, out: Output, skip_aux: bool) -> tuple[Tensor, Tensor, Output]:
    """Return the sum, the values and the output of a gradient query; only the sum has a graph.

    With `skip_aux` the auxiliary output is a new tensor of width 0. A slice of width 0 would keep
    the auxiliary head in the compiled graph.
    """
    shown = out._replace(aux=out.logits.new_zeros(len(out.logits), 0)) if skip_aux else out
    return value.sum(), value.detach(), shown.detached()


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
