"""What a goal is: a function of a net's output and the labels, and of what it remembers.

    kept = goal.begin(moment)                              # once, where an attack starts
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
from demur.output import Output, output_of
from demur.spec import Spec

Kept = tuple[Tensor, ...]


class Moment(NamedTuple):
    """Where an attack starts."""

    model: Model
    x: Tensor
    x_start: Tensor
    y: Tensor
    target: Tensor | None  # a wrong class for each image, if the attack has one

    def seen(self, x: Tensor) -> Output:
        """What the model makes of images."""
        with torch.no_grad():
            return output_of(self.model(x)).detached()

    def aim(self) -> Tensor:
        """The target, or BadInput."""
        if self.target is None:
            raise BadInput("this goal needs a target; use it in EachTarget")
        return self.target


@dataclass(frozen=True)
class Goal(Spec, ABC):
    """One value per image that an attacker wants large."""

    @abstractmethod
    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """One value per image."""

    @property
    def arity(self) -> int:
        """How many tensors it is given."""
        return 0

    def begin(self, moment: Moment) -> Kept:
        """What it remembers of the start, one row per image."""
        return ()

    def given(self, kept: Kept, step: int, steps: int) -> Kept:
        """What it looks at in a step."""
        return kept

    def __add__(self, other: "Goal") -> "Sum":
        return Sum((*_terms(self), *_terms(other)))

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(factor, self)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Around(Goal, ABC):
    """A goal made of one other, which alone remembers."""

    @property
    @abstractmethod
    def inner(self) -> Goal:
        """The other goal."""

    @property
    def arity(self) -> int:
        """As many as the other."""
        return self.inner.arity

    def begin(self, moment: Moment) -> Kept:
        """What the other remembers."""
        return self.inner.begin(moment)

    def given(self, kept: Kept, step: int, steps: int) -> Kept:
        """What the other looks at."""
        return self.inner.given(kept, step, steps)


@dataclass(frozen=True)
class Sum(Goal):
    """Several goals added."""

    goals: tuple[Goal, ...]

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The sum of the goals' values."""
        parts = zip(self.goals, self._shared_out(given), strict=True)
        return torch.stack([goal(out, y, *own) for goal, own in parts]).sum(0)

    @property
    def arity(self) -> int:
        """All that its goals are given."""
        return sum(goal.arity for goal in self.goals)

    def begin(self, moment: Moment) -> Kept:
        """All that its goals remember."""
        return tuple(part for goal in self.goals for part in goal.begin(moment))

    def given(self, kept: Kept, step: int, steps: int) -> Kept:
        """All that its goals look at."""
        parts = zip(self.goals, self._shared_out(kept), strict=True)
        return tuple(part for goal, own in parts for part in goal.given(own, step, steps))

    def _shared_out(self, tensors: Kept) -> list[Kept]:
        shares, start = [], 0
        for goal in self.goals:
            shares.append(tensors[start : start + goal.arity])
            start += goal.arity
        return shares


@dataclass(frozen=True)
class Scaled(Around):
    """A goal times a factor; a negative one turns it round."""

    factor: float
    goal: Goal

    @property
    def inner(self) -> Goal:
        """The goal that is scaled."""
        return self.goal

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The scaled value."""
        return self.factor * self.goal(out, y, *given)


def _terms(goal: Goal) -> tuple[Goal, ...]:
    return goal.goals if isinstance(goal, Sum) else (goal,)
