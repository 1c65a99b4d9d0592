"""What a goal is: a function of a net's output and the labels, and of what it remembers.

    kept = goal.prepare(moment)                              # once, where an attack starts
    value = goal(out, y, *goal.given(kept, step, steps))   # one value per image, to be raised

Most goals remember nothing. What is remembered has one row per image, so that images can leave.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from demur.errors import BadInput
from demur.gradient import Model
from demur.output import Output, as_output
from demur.spec import Spec

ObjectiveState = tuple[Tensor, ...]


class AttackStart(NamedTuple):
    """Where an attack starts."""

    model: Model
    x: Tensor
    x_start: Tensor
    y: Tensor
    target: Tensor | None  # a wrong class for each image, if the attack has one

    def seen(self, x: Tensor) -> Output:
        """What the model makes of images."""
        with torch.no_grad():
            return as_output(self.model(x)).detached()

    def aim(self) -> Tensor:
        """The target, or BadInput."""
        if self.target is None:
            raise BadInput("this goal needs a target; use it in EachTarget")
        return self.target


@dataclass(frozen=True)
class Objective(Spec, ABC):
    """One value per image that an attacker wants large."""

    @abstractmethod
    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """One value per image."""

    @property
    def n_inputs(self) -> int:
        """How many tensors it is given."""
        return 0

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """What it remembers of the start, one row per image."""
        return ()

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        """What it looks at in a step."""
        return objective_state

    def __add__(self, other: "Objective") -> "Sum":
        return Sum((*_terms(self), *_terms(other)))

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(factor, self)

    __rmul__ = __mul__


@dataclass(frozen=True)
class WrappedObjective(Objective, ABC):
    """A goal made of one other, which alone remembers."""

    @property
    @abstractmethod
    def inner(self) -> Objective:
        """The other goal."""

    @property
    def n_inputs(self) -> int:
        """As many as the other."""
        return self.inner.n_inputs

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """What the other remembers."""
        return self.inner.prepare(start_point)

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        """What the other looks at."""
        return self.inner.at_step(objective_state, step, steps)


@dataclass(frozen=True)
class Sum(Objective):
    """Several goals added."""

    objectives: tuple[Objective, ...]

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The sum of the goals' values."""
        parts = zip(self.objectives, self._shared_out(inputs), strict=True)
        return torch.stack([objective(out, y, *own) for objective, own in parts]).sum(0)

    @property
    def n_inputs(self) -> int:
        """All that its goals are given."""
        return sum(objective.n_inputs for objective in self.objectives)

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """All that its goals remember."""
        return tuple(
            part for objective in self.objectives for part in objective.prepare(start_point)
        )

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        """All that its goals look at."""
        parts = zip(self.objectives, self._shared_out(objective_state), strict=True)
        return tuple(
            part for objective, own in parts for part in objective.at_step(own, step, steps)
        )

    def _shared_out(self, tensors: ObjectiveState) -> list[ObjectiveState]:
        shares, start = [], 0
        for objective in self.objectives:
            shares.append(tensors[start : start + objective.n_inputs])
            start += objective.n_inputs
        return shares


@dataclass(frozen=True)
class Scaled(WrappedObjective):
    """A goal times a factor; a negative one turns it round."""

    factor: float
    objective: Objective

    @property
    def inner(self) -> Objective:
        """The goal that is scaled."""
        return self.objective

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The scaled value."""
        return self.factor * self.objective(out, y, *inputs)


def _terms(objective: Objective) -> tuple[Objective, ...]:
    return objective.objectives if isinstance(objective, Sum) else (objective,)
