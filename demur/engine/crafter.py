"""A net as an attack sees it: the same answers, its weights held still in the fast arithmetic.

    crafter = Crafter(net, "bf16")
    attack.perturbed(crafter, x, y, index)      # gradients come from compiled code

In eval mode batch norm is folded into scales and shifts; in train mode running statistics are the
net's own and move, with every look or by `remember`. `refresh` follows a net that has learned.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.engine.copies import Compiler, Copy, Look, Moving
from demur.engine.folding import Folded
from demur.engine.quick import Quick, quick_suits
from demur.engine.recording import Recording, first_line
from demur.engine.rooms import Room, Rooms
from demur.gradient import GoalFunction, Gradient
from demur.nets import RejectingNet
from demur.output import Output
from demur.precision import Precision, rounded, unlowered

Want = Literal["gradient", "slope", "value"]


class Crafter(nn.Module):
    """What the engine hands to an attack in place of the net."""

    def __init__(
        self,
        net: RejectingNet,
        precision: Precision,
        compiler: Compiler = "inductor",
        fixed: int | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__()
        self.precision, self.compiler, self.say = precision, compiler, say
        # for batches padded to a few sizes, each recorded; None where all batches are alike and
        # recorded by whoever crafts
        self.rooms: Rooms | None = None
        self._source = (net,)  # in a tuple, so that its weights are not this module's
        self._copies: dict[bool, Copy] = {}  # by mode
        self._recordings: dict[tuple[GoalFunction, Want, Room], Recording[Gradient]] = {}
        self._answers: dict[int, Recording[Output]] = {}  # in full precision, by batch size
        self._unrecorded: set[GoalFunction] = set()  # goals that no compiler or recorder takes
        self._looks: dict[tuple[GoalFunction, Want, bool], Look] = {}  # by mode too
        self.train(net.training)
        if fixed is not None:
            self.size_to(fixed)

    @property
    def exact(self) -> bool:
        """Whether `gradient` answers as the net does; where not, `forward` still does."""
        return self.precision in ("fp32", "fp64")

    def forward(self, x: Tensor) -> Output:
        """The net's own answer in full precision; that of the copy while the net is learning."""
        if self._source[0].training:
            return self._copy().answer(x)
        followed = torch.is_grad_enabled() and x.requires_grad
        if self.rooms is None or len(x) > self.rooms.largest or followed or not x.is_cuda:
            return self._exact(x)
        room = self.rooms.usual(len(x))
        if room not in self._answers:  # untuned: a few looks would not pay for the trials
            quietly = torch.no_grad()(self._exact)
            self._answers[room] = Recording(quietly, filled_up(x, room), tune=False)
        return Output(*(part[: len(x)].clone() for part in self._answers[room](x)))

    def _exact(self, x: Tensor) -> Output:
        with rounded("fp32"), unlowered(x.device):
            out: Output = self._source[0](x)
        return out

    def gradient(self, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor) -> Gradient:
        """The goal's gradient with respect to each image."""
        return self._sized(goal, "gradient", x, y, *given)

    def slope(self, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
        """The goal's gradient alone."""
        return self._sized(goal, "slope", x, y, *given).grad

    def value(
        self, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor
    ) -> tuple[Tensor, Output]:
        """The goal's value and the output, in the arithmetic of the gradient."""
        found = self._sized(goal, "value", x, y, *given)
        return found.value, found.out

    def _sized(
        self, goal: GoalFunction, want: Want, x: Tensor, y: Tensor, *given: Tensor
    ) -> Gradient:
        """The gradient, taken in a batch of a compiled size."""
        if self.rooms is None or self.training:  # padding would move the statistics
            return self._gradient(goal, want, x, y, *given)
        count, room = len(x), self.rooms.room((goal, want), len(x))
        grad, value, out = self._taken(goal, want, room, x, y, *given)
        return Gradient(  # copies, since the next replay writes over what this one made
            grad[:count].clone(), value[:count].clone(),
            Output(*(part[:count].clone() for part in out)),
        )  # fmt: skip

    def _taken(
        self, goal: GoalFunction, want: Want, room: Room, x: Tensor, y: Tensor, *given: Tensor
    ) -> Gradient:
        """The gradient by a recording if there can be one, else as it comes."""
        if goal in self._unrecorded or not x.is_cuda:
            whole = (filled_up(part, room.size) for part in (x, y, *given))
            return self._gradient(goal, want, *whole)
        try:
            return self._recording(goal, want, room, x, y, *given)(x, y, *given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler or the recorder
            self._unrecorded.add(goal)
            self._looks.clear()
            self.say(f"this goal cannot be compiled and is attacked slowly: {first_line(error)}")
            return self._gradient(goal, want, x, y, *given)

    def _gradient(
        self, goal: GoalFunction, want: Want, x: Tensor, y: Tensor, *given: Tensor
    ) -> Gradient:
        if want == "value":
            with torch.no_grad():
                _, value, out = self._look(goal, want)(x, y, *given)
            return Gradient(x[:, :0], value, out)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            total, value, out = self._look(goal, want)(x, y, *given)
            with unlowered(x.device):
                (grad,) = torch.autograd.grad(total, x)
        return Gradient(grad, value, out)

    def _recording(
        self, goal: GoalFunction, want: Want, room: Room, *examples: Tensor
    ) -> Recording[Gradient]:
        """The gradient of a goal for one batch size, recorded when first asked for."""
        assert not self.training, "trying it out would move running statistics"
        key = (goal, want, room)
        if key not in self._recordings:
            whole = (filled_up(part, room.size) for part in examples)
            self._recordings.pop((goal, want, room._replace(tuned=False)), None)  # it holds memory
            look = partial(self._gradient, goal, want)
            self._recordings[key] = Recording(look, *whole, tune=room.tuned)
        return self._recordings[key]

    def size_to(self, largest: int) -> None:
        """Expect batches of at most this size; what was recorded for others is dropped."""
        if self.rooms is None or largest != self.rooms.largest:
            # where each size is compiled for itself, no waste pays for another
            self.rooms = Rooms(largest, fits=self.compiler == "none")
            self._answers.clear()
            self.forget()

    def forget(self) -> None:
        """Drop all recordings, which hold memory, as when another attack begins."""
        self._recordings.clear()
        if self.rooms is not None:
            self.rooms.forget()

    def batch_norms(self) -> list[_BatchNorm]:
        """Those of the copy for this mode; a frame may hold their momentum."""
        return [m for m in self._copy().net.modules() if isinstance(m, _BatchNorm)]

    def remember(self) -> None:
        """Let the norms take in what was looked at; whoever crafts says when that is over."""
        for held in self._copies.values():
            if isinstance(held, Quick):
                held.remember()

    def refresh(self) -> None:
        """Take over what the net has learned."""
        for held in self._copies.values():
            held.refresh()

    def _copy(self) -> Copy:
        """The copy to look at in this mode, made when first asked for."""
        train = self.training
        if train not in self._copies:
            (source,) = self._source
            if quick_suits(source, self.precision):
                self._copies[train] = Quick(source, train, self.precision, self.compiler)
            else:
                kind = Moving if train else Folded
                self._copies[train] = kind(source, self.precision)
        return self._copies[train]

    def _look(self, goal: GoalFunction, want: Want) -> Look:
        """One look at images for a goal, compiled when first asked for."""
        key = (goal, want, self.training)
        if key not in self._looks:
            compiler = "none" if goal in self._unrecorded else self.compiler
            self._looks[key] = self._copy().look(goal, compiler, bare=want == "slope")
        return self._looks[key]


def filled_up(batch: Tensor, room: int) -> Tensor:
    """A batch with zeros behind it, up to the room there is."""
    if len(batch) == room:
        return batch
    return torch.cat([batch, batch.new_zeros(room - len(batch), *batch.shape[1:])])
