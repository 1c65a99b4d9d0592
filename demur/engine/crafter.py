"""A net as an attack sees it: the same answers, its weights held still in the fast arithmetic.

    crafter = Crafter(net, "bf16")
    attack.perturbed(crafter, x, y, index)      # gradients come from compiled code

In eval mode batch norm is folded into the weights; in train mode running statistics are the
net's own and move with every look. `refresh` follows the net after it has learned.
"""

import copy
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from demur.device import full_precision
from demur.engine.folding import Folded
from demur.gradient import GoalFunction, Gradient
from demur.nets import RejectingNet
from demur.output import Output
from demur.precision import Precision, lowered, products_dtype

P = ParamSpec("P")
R = TypeVar("R")
SMALLEST = 16  # images: below that a padded batch costs no more
Compiler = Literal["inductor", "aot_eager", "none"]
Look = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Output]]


class Crafter(nn.Module):
    """What the engine hands to an attack in place of the net."""

    def __init__(
        self,
        net: RejectingNet,
        precision: Precision,
        compiler: Compiler = "inductor",
        fixed: int | None = None,
    ) -> None:
        super().__init__()
        self.precision, self.compiler = precision, compiler
        self.fixed = fixed  # the largest batch there will be; smaller ones are padded to buckets
        self._source = (net,)  # in a tuple, so that its weights are not this module's
        self._still: Folded | None = None
        self._moving: Moving | None = None
        self._looks: dict[tuple[GoalFunction, bool], Look] = {}
        self.train(net.training)

    @property
    def exact(self) -> bool:
        """Whether `gradient` answers as the net does; where not, `forward` still does."""
        return self.precision in ("fp32", "fp64")

    def forward(self, x: Tensor) -> Output:
        """The net's own answer in full precision; in train mode that of the moving copy."""
        if self.training:
            with lowered(self.precision, x.device):
                moving: Output = self._copy()(x)
            return moving
        with full_precision(), torch.autocast(x.device.type, enabled=False):
            out: Output = self._source[0](x)
        return out

    def gradient(self, goal: GoalFunction, x: Tensor, y: Tensor) -> Gradient:
        """The goal's gradient with respect to each image."""
        count, room = len(x), self._bucket(len(x))
        x = filled_up(x, room).detach().requires_grad_()
        with torch.enable_grad():
            total, value, out = self._look(goal)(x, filled_up(y, room))
            (grad,) = torch.autograd.grad(total, x)
        if room == count:
            return Gradient(grad, value, out)
        return Gradient(grad[:count], value[:count], Output(*(part[:count] for part in out)))

    def _bucket(self, count: int) -> int:
        """The compiled batch size that takes so many images: the largest one, or it halved."""
        if self.fixed is None or self.training or count > self.fixed:
            return count
        room = self.fixed
        while room // 2 >= max(count, SMALLEST):
            room //= 2
        return room

    def refresh(self) -> None:
        """Take over what the net has learned."""
        for part in (self._still, self._moving):
            if part is not None:
                part.refresh()

    def _copy(self) -> RejectingNet:
        """The net to look at in this mode, made when first asked for."""
        (source,) = self._source
        dtype = products_dtype(self.precision)
        if self.training:
            self._moving = self._moving or Moving(source, dtype)
            return self._moving.net
        self._still = self._still or Folded(source, dtype)
        return self._still.net

    def _look(self, goal: GoalFunction) -> Look:
        """One look at images for a goal, compiled when first asked for."""
        key = (goal, self.training)
        if key not in self._looks:
            net, precision = self._copy(), self.precision

            def look(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Output]:
                with lowered(precision, x.device):
                    out = net(x)
                value = goal(out, y)
                return value.sum(), value.detach(), out.detached()

            self._looks[key] = compiled(look, self.compiler)
        return self._looks[key]


def filled_up(batch: Tensor, room: int) -> Tensor:
    """A batch with zeros behind it, up to the room there is."""
    if len(batch) == room:
        return batch
    return torch.cat([batch, batch.new_zeros(room - len(batch), *batch.shape[1:])])


class Moving:
    """A copy in train mode with its own weights but the source's running statistics."""

    def __init__(self, source: RejectingNet, dtype: torch.dtype) -> None:
        self.net = copy.deepcopy(source).requires_grad_(False).train()
        for name, module in source.named_modules():
            twin = self.net.get_submodule(name)
            twin._buffers = module._buffers
            if isinstance(twin, nn.Conv2d):
                twin.weight.data = twin.weight.data.to(dtype)
        self.pairs = list(zip(self.net.parameters(), source.parameters(), strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the source's weights as they are now."""
        torch._foreach_copy_([twin for twin, _ in self.pairs], [own for _, own in self.pairs])


def compiled(function: Callable[P, R], compiler: Compiler) -> Callable[P, R]:
    """The function compiled for fixed shapes, or as it is."""
    if compiler == "none":
        return function
    made: Callable[P, R] = torch.compile(function, dynamic=False, fullgraph=True, backend=compiler)
    return made
