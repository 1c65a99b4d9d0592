"""Attacks one after the other: an image that one has broken is left alone by the rest.

Chain((APGD(Linf(8/255)), Square(Linf(8/255))))
Chain(..., criterion=Slips(RCon(), TPR(0.95)), by=Least(...))     # and the best try elsewhere

An `Ensemble` is a chain with a name, spelt out when it is run.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.criteria import Criterion, Wrong
from demur.attacks.goals import CE, Goal, Kept, Moment
from demur.attacks.victims import Victims
from demur.errors import BadInput
from demur.gradient import value_at
from demur.noise import Stream

NOBODY, NOTHING = -1, -2  # nobody broke it; nothing had to, it was broken as it came


@dataclass
class Standing:
    """How far a chain has come, one row per image."""

    x_adv: Tensor  # the best so far
    value: Tensor  # of the goal it is chosen by
    broken_by: Tensor  # the place in the chain of whoever broke it
    tried: Tensor  # how many of the attacks have been at it
    given: Kept  # what the goal remembers

    def left(self, place: int) -> Tensor:
        """Who is still whole and has not met the attack at that place."""
        return ((self.broken_by == NOBODY) & (self.tried <= place)).nonzero()[:, 0]


@dataclass(frozen=True)
class Chain(Attack):
    """Where nothing breaks an image: the try with the largest `by`; without it, the image itself.

    Every verdict is taken on the model's own answer, never on rough arithmetic.
    """

    attacks: tuple[Attack, ...]
    criterion: Criterion = Wrong()
    by: Goal | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks:
            raise BadInput("a chain needs at least one attack")

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """What the attacks make of their victims."""
        standing = self.begun(on)
        for place in range(len(self.attacks)):
            self.advance(place, standing.left(place), on, standing, stream)
        return standing.x_adv

    def begun(self, on: Victims) -> Standing:
        """The images before any attack."""
        goal = self.by or CE()
        given = goal.given(goal.begin(Moment(on.model, on.x, on.x, on.y, on.target)), 0, 1)
        value, out = value_at(on.model, goal, on.x, on.y, *given)
        broken_by = torch.where(self.criterion(out, on.y), NOTHING, NOBODY)
        return Standing(on.x.clone(), value, broken_by, torch.zeros_like(on.y), given)

    def advance(
        self, place: int, rows: Tensor, on: Victims, standing: Standing, stream: Stream
    ) -> None:
        """Let the attack at a place try the images in some rows."""
        if len(rows) == 0:
            return
        left, known = on.at(rows), [part[rows] for part in standing.given]
        x_adv = self.attacks[place].against(left, noise.derived(stream, place))
        value, out = value_at(on.model, self.by or CE(), x_adv, left.y, *known)
        broken = self.criterion(out, left.y)
        better = broken | (value > standing.value[rows]) if self.by else broken
        standing.x_adv[rows[better]] = x_adv[better]
        standing.value[rows[better]] = value[better]
        standing.broken_by[rows[broken]] = place
        standing.tried[rows] = place + 1
        if (forget := getattr(on.model, "forget", None)) is not None:
            forget()  # what was recorded for this attack is of no use to the next


@dataclass(frozen=True)
class Ensemble(Attack, ABC):
    """An attack that is a chain of others."""

    @abstractmethod
    def chain(self) -> Chain:
        """The chain spelt out."""

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """What the chain makes of its victims."""
        return self.chain().against(on, stream)
