"""Copies of a net that attacks look at: weights held still, in the arithmetic of crafting.

    copy = TrainModeCopy(net, "bf16")                            # train mode: statistics are the net's
    total, value, out = copy.look(goal, "inductor")(x, y) # differentiable in x

`refresh` follows the net after it has learned. Which kind serves best is the crafter's to say.
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
ObjectiveForward = Callable[
    ..., tuple[Tensor, Tensor, Output]
]  # of images, labels, what a goal is given


class ModelCopy(ABC):
    """A copy of `source` in one mode of batch norm."""

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
        """Take over what the source has learned."""

    def answer(self, x: Tensor) -> Output:
        """What the copy makes of images."""
        with autocast(self.precision, x.device):
            out: Output = self.net(x)
        return out

    def objective_forward(
        self, objective: ObjectiveFunction, compiler: Compiler, skip_aux: bool = False
    ) -> ObjectiveForward:
        """One look at images: the goal's sum, its values, and the output, `bare` without aux."""

        def looked(x: Tensor, y: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Output]:
            return judged(objective(out := self.answer(x), y, *given), out, skip_aux)

        return compile_function(looked, compiler)


class TrainModeCopy(ModelCopy):
    """A copy in train mode with its own weights but the source's running statistics."""

    def __init__(self, source: RejectingNet, precision: Precision) -> None:
        super().__init__(source, True, precision)
        for name, module in source.named_modules():
            self.net.get_submodule(name)._buffers = module._buffers
        self.pairs = list(zip(self.net.parameters(), source.parameters(), strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the source's weights as they are now."""
        copy_tensors([twin for twin, _ in self.pairs], [own for _, own in self.pairs])


def copy_tensors(held: list[Tensor], given: list[Tensor]) -> None:
    """Copy tensors into others with few launches, whatever their types are.

    A launch takes many tensors where all are of one type, are copied to one, and lie alike; a list
    that mixes them would be copied tensor by tensor.
    """
    alike: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for own, new in zip(held, given, strict=True):
        key = own.dtype, new.dtype, own.stride() == new.stride()
        into, out_of = alike.setdefault(key, ([], []))
        into.append(own)
        out_of.append(new)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)


def judged(value: Tensor, out: Output, skip_aux: bool) -> tuple[Tensor, Tensor, Output]:
    """What a look returns; only the sum has a history.

    Of a bare one nobody sees the auxiliary output. What stands for it is made of nothing: a part of
    width 0 would be computed like the whole.
    """
    shown = out._replace(aux=out.logits.new_zeros(len(out.logits), 0)) if skip_aux else out
    return value.sum(), value.detach(), shown.detached()


def compile_function(function: Callable[P, R], compiler: Compiler) -> Callable[P, R]:
    """The function compiled for fixed shapes, or as it is."""
    if compiler == "none":
        return function

    def own(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    # the compiler allows a piece of code eight versions: each function has code of its own
    own.__code__ = own.__code__.replace()
    made: Callable[P, R] = torch.compile(own, dynamic=False, fullgraph=True, backend=compiler)
    return made
