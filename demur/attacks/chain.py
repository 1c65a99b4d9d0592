"""Attacks one after the other: an image that one has broken is left alone by the rest.

Chain((APGD(Linf(8/255)), Square(Linf(8/255))))
Chain(..., criterion=AcceptedError(RCon(), TPR(0.95)), rank_by=MinMargin(...))     # and the best try elsewhere

An `Ensemble` is a chain with a name, spelt out when it is run.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.objectives import CE, AttackStart, Objective, ObjectiveState
from demur.errors import BadInput
from demur.gradient import exact_value
from demur.noise import Stream

NOBODY, NOTHING = -1, -2  # nobody broke it; nothing had to, it was broken as it came


@dataclass
class ChainState:
    """How far a chain has come, one row per image."""

    x_adv: Tensor  # the best so far
    value: Tensor  # of the goal it is chosen by
    broken_by: Tensor  # the place in the chain of whoever broke it
    tried: Tensor  # how many of the attacks have been at it
    inputs: ObjectiveState  # what the goal remembers

    def left(self, member: int) -> Tensor:
        """Who is still whole and has not met the attack at that place."""
        return ((self.broken_by == NOBODY) & (self.tried <= member)).nonzero()[:, 0]


@dataclass(frozen=True)
class Chain(Attack):
    """Where nothing breaks an image: the try with the largest `by`; without it, the image itself.

    Every verdict is taken on the model's own answer, never on rough arithmetic.
    """

    attacks: tuple[Attack, ...]
    criterion: Criterion = Misclassified()
    rank_by: Objective | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks:
            raise BadInput("a chain needs at least one attack")

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """What the attacks make of their victims."""
        chain_state = self.begun(batch)
        for member in range(len(self.attacks)):
            self.advance(member, chain_state.left(member), batch, chain_state, stream)
        return chain_state.x_adv

    def begun(self, batch: AttackBatch) -> ChainState:
        """The images before any attack."""
        objective = self.rank_by or CE()
        inputs = objective.at_step(
            objective.prepare(AttackStart(batch.model, batch.x, batch.x, batch.y, batch.target)),
            0,
            1,
        )
        value, out = exact_value(batch.model, objective, batch.x, batch.y, *inputs)
        broken_by = torch.where(self.criterion(out, batch.y), NOTHING, NOBODY)
        return ChainState(batch.x.clone(), value, broken_by, torch.zeros_like(batch.y), inputs)

    def advance(
        self, member: int, rows: Tensor, batch: AttackBatch, chain_state: ChainState, stream: Stream
    ) -> None:
        """Let the attack at a place try the images in some rows."""
        if len(rows) == 0:
            return
        left, known = batch.select(rows), [part[rows] for part in chain_state.inputs]
        x_adv = self.attacks[member].run(left, noise.derived(stream, member))
        value, out = exact_value(batch.model, self.rank_by or CE(), x_adv, left.y, *known)
        broken = self.criterion(out, left.y)
        better = broken | (value > chain_state.value[rows]) if self.rank_by else broken
        chain_state.x_adv[rows[better]] = x_adv[better]
        chain_state.value[rows[better]] = value[better]
        chain_state.broken_by[rows[broken]] = member
        chain_state.tried[rows] = member + 1
        if (forget := getattr(batch.model, "forget", None)) is not None:
            forget()  # what was recorded for this attack is of no use to the next


@dataclass(frozen=True)
class Ensemble(Attack, ABC):
    """An attack that is a chain of others."""

    @abstractmethod
    def chain(self) -> Chain:
        """The chain spelt out."""

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """What the chain makes of its victims."""
        return self.chain().run(batch, stream)
