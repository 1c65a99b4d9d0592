"""Chains: several attacks in turn, each on the images on which no earlier one succeeded.

Chain((APGD(Linf(8/255)), Square(Linf(8/255))))
Chain(attacks, criterion=accepted_error, rank_by=MinMargin(accepted_error))
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
from demur.gradient import attack_model, exact_value
from demur.noise import Stream

# Values of ChainState.broken_by that name no attack.
NOT_BROKEN = -1  # no attack has succeeded yet
BROKEN_CLEAN = -2  # the clean image satisfies the criterion


@dataclass
class ChainState:
    """The progress of a chain, one row per image."""

    x_adv: Tensor  # the best example so far
    value: Tensor  # its value of `rank_by`
    broken_by: Tensor  # the position of the attack that succeeded, or a constant above
    tried: Tensor  # the number of attacks that have run on the image
    inputs: ObjectiveState  # of the objective `rank_by`

    def remaining(self, member: int) -> Tensor:
        """Return the rows of the images that the attack at position `member` must still try."""
        return ((self.broken_by == NOT_BROKEN) & (self.tried <= member)).nonzero()[:, 0]


@dataclass(frozen=True)
class Chain(Attack):
    """Attacks in turn; an image leaves the chain after the first success.

    Success is decided by an exact forward pass in fp32.

    Args:
        attacks: The attacks, in the order in which they run.
        criterion: The success criterion.
        rank_by: Where no attack succeeds, return the example with the largest value of this
            objective. None returns the clean image instead.
    """

    attacks: tuple[Attack, ...]
    criterion: Criterion = Misclassified()
    rank_by: Objective | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attacks:
            raise BadInput("a chain needs at least one attack: Chain((PGD(Linf(8/255)),))")

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        chain_state = self.start(batch)
        for member in range(len(self.attacks)):
            self.advance(member, chain_state.remaining(member), batch, chain_state, stream)
        return chain_state.x_adv

    def start(self, batch: AttackBatch) -> ChainState:
        """Return the state before the first attack."""
        objective = self.rank_by or CE()
        start_point = AttackStart(batch.model, batch.x, batch.x, batch.y, batch.target)
        inputs = objective.at_step(objective.prepare(start_point), 0, 1)
        value, out = exact_value(batch.model, objective, batch.x, batch.y, *inputs)
        broken_by = torch.where(self.criterion(out, batch.y), BROKEN_CLEAN, NOT_BROKEN)
        return ChainState(batch.x.clone(), value, broken_by, torch.zeros_like(batch.y), inputs)

    def advance(
        self, member: int, rows: Tensor, batch: AttackBatch, chain_state: ChainState, stream: Stream
    ) -> None:
        """Run the attack at position `member` on some rows and update the state in place."""
        if len(rows) == 0:
            return
        selected, inputs = batch.select(rows), [part[rows] for part in chain_state.inputs]
        x_adv = self.attacks[member].run(selected, noise.derive_seed(stream, member))
        value, out = exact_value(batch.model, self.rank_by or CE(), x_adv, selected.y, *inputs)
        success = self.criterion(out, selected.y)
        better = success | (value > chain_state.value[rows]) if self.rank_by else success
        chain_state.x_adv[rows[better]] = x_adv[better]
        chain_state.value[rows[better]] = value[better]
        chain_state.broken_by[rows[success]] = member
        chain_state.tried[rows] = member + 1
        # CUDA graphs captured for this attack's objective hold memory
        attack_model(batch.model).drop_graphs()


@dataclass(frozen=True)
class Ensemble(Attack, ABC):
    """A named chain of attacks; subclasses implement `chain`."""

    @abstractmethod
    def chain(self) -> Chain:
        """Return the chain that `run` executes."""

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        return self.chain().run(batch, stream)
