"""Attacks made of attacks: several in turn, or one towards each wrong class.

    Chain((APGD(Linf(8/255)), Square(Linf(8/255))))
    MultiTarget(PGD(Linf(8/255), steps=100, objective=TargetedMargin()), restarts=20)

Each part attacks the images on which no earlier one succeeded.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur import noise, progress
from demur.attacks.attack import Attack, AttackBatch
from demur.attacks.attack_model import exact_value
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.driver import Best, Found
from demur.attacks.objectives import CE, Objective, ObjectiveState
from demur.errors import BadInput
from demur.noise import Stream
from demur.spec import later
from demur.spec.field_types import PositiveInt

# Values of ChainState.broken_by that name no attack.
NOT_BROKEN = -1  # no attack has succeeded yet
BROKEN_CLEAN = -2  # the clean image satisfies the criterion


@dataclass
class ChainState(Best):
    """The progress of a chain, one row per image; `value` is that of `rank_by`."""

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

    @property
    def parts(self) -> tuple[Attack, ...]:
        return self.attacks

    @property
    def maximised(self) -> Objective | None:
        return self.rank_by if any(part.maximised for part in self.parts) else None

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        chain_state = self.start(batch)
        for member in range(len(self.attacks)):
            self.advance(member, chain_state.remaining(member), batch, chain_state, stream)
        return chain_state.x_adv

    def start(self, batch: AttackBatch) -> ChainState:
        """Return the state before the first attack."""
        objective = self.rank_by or CE()
        inputs = objective.at_step(batch.prepare(objective, batch.x).objective_state, 0, 1)
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
        chain_state.keep_better(rows, Found(x_adv, value, success), by_value=bool(self.rank_by))
        chain_state.broken_by[rows[success]] = member
        chain_state.tried[rows] = member + 1
        # CUDA graphs captured for this attack's objective hold memory
        batch.model.drop_graphs()


@dataclass(frozen=True)
class Ensemble(Attack, ABC):
    """A named chain of attacks; subclasses implement `chain`."""

    @abstractmethod
    def chain(self) -> Chain:
        """Return the chain that `run` executes."""

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        return self.chain().run(batch, stream)

    @property
    def parts(self) -> tuple[Attack, ...]:
        return self.chain().attacks

    @property
    def maximised(self) -> Objective | None:
        return self.chain().maximised


@dataclass(frozen=True)
class MultiTarget(Attack):
    """A targeted attack towards the wrong classes of each image (Gowal et al. 2019).

    The classes follow each other by decreasing logit. With keep="max_objective" the example with
    the largest cross-entropy over targets and restarts is returned, as in the reference code.

    Args:
        attack: The attack to run for each target. Its own restarts, if any, are compared by its
            own objective.
        targets: The number of targets; None is every wrong class.
        keep: "max_objective" returns the example with the largest `rank_by` over all targets and
            restarts. "success" returns the first success; images leave after it.
        rank_by: The objective that compares examples.
        criterion: The success criterion, used by keep="success".
        restarts: The number of runs towards each target.
    """

    attack: Attack
    targets: PositiveInt | None = None
    keep: Literal["max_objective", "success"] = "max_objective"
    rank_by: Objective = CE()
    criterion: Criterion = Misclassified()
    restarts: PositiveInt = field(default=1, metadata=later(neutral=1))

    @property
    def parts(self) -> tuple[Attack, ...]:
        return (self.attack,)

    @property
    def gradient_queries(self) -> float:
        """Gradient queries per image; one target is counted if the attack takes all of them."""
        return (self.targets or 1) * self.restarts * self.attack.gradient_queries

    @property
    def maximised(self) -> Objective | None:
        return self.rank_by if self.attack.maximised else None

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        ranked = replace(batch, target=None).prepare(self.rank_by, batch.x)
        inputs = self.rank_by.at_step(ranked.objective_state, 0, 1)
        value, out = exact_value(batch.model, self.rank_by, batch.x, batch.y, *inputs)
        targets = self._targets(out.logits, batch.y)
        if self.keep == "success":
            found = Found(batch.x.clone(), value, self.criterion(out, batch.y))
        else:
            found = Found.nothing(batch)
        attempts = self.restarts * len(targets)
        for number, rows in found.attempts(attempts):
            selected = replace(batch, target=targets[number % len(targets)]).select(rows)
            with progress.part(number, attempts):
                x_adv = self.attack.run(selected, noise.derive_seed(stream, number))
            found.add(rows, self._evaluate(selected, x_adv, [part[rows] for part in inputs]))
        return found.x_adv

    def _evaluate(self, batch: AttackBatch, x_adv: Tensor, inputs: list[Tensor]) -> Found:
        """Return the examples with `rank_by` and success, if images leave after it."""
        value, out = exact_value(batch.model, self.rank_by, x_adv, batch.y, *inputs)
        success = self.criterion(out, batch.y)
        return Found(x_adv, value, success & (self.keep == "success"))

    def _targets(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the wrong classes of each image by decreasing logit, shape (targets, N)."""
        classes = logits.shape[-1]
        is_true = one_hot(y, classes).bool()
        ranked = logits.masked_fill(is_true, -torch.inf).argsort(-1, descending=True)
        return ranked[:, : min(self.targets or classes, classes - 1)].t()
