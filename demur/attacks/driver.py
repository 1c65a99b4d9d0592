"""What all attacks share: restarts, images that leave, verified successes, the best example.

A fast model may compute in bf16. An iterate that satisfies the success criterion there is only a
*candidate*, until an exact forward pass in fp32 confirms it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from demur import noise, progress
from demur.attacks.attack import Attack, AttackBatch
from demur.attacks.attack_model import AttackModel
from demur.attacks.criteria import Criterion
from demur.attacks.objectives.classification import CE
from demur.images import per_image
from demur.noise import Stream
from demur.numerics import use_precision
from demur.output import as_output


@dataclass
class Candidates:
    """Candidate successes, for each image the one with the largest objective."""

    x_adv: Tensor
    value: Tensor  # of the objective, N
    present: Tensor  # whether the image has a candidate, N, bool

    @classmethod
    def empty(cls, x: Tensor) -> Self:
        return cls(x, x.new_zeros(len(x)), torch.zeros(len(x), dtype=torch.bool, device=x.device))

    def update(self, x_adv: Tensor, value: Tensor, success: Tensor) -> "Candidates":
        """Add the iterates with `success`, where they have a larger objective value."""
        better = success & (~self.present | (value > self.value))
        x_adv = torch.where(per_image(better, x_adv), x_adv, self.x_adv)
        return Candidates(x_adv, torch.where(better, value, self.value), self.present | success)


@dataclass
class SearchState:
    """The state of an iterative attack at its current iterate: tensors with one row per image."""

    x_adv: Tensor
    value: Tensor  # of the objective at x_adv, N
    candidate: Tensor  # whether x_adv is a candidate success, N, bool

    @property
    def best(self) -> tuple[Tensor, Tensor]:
        """The examples to return where the search does not succeed, and their values."""
        return self.x_adv, self.value

    def select(self, rows: Tensor) -> Self:
        """Return the state of the given rows (indices or a boolean mask)."""
        return type(self)(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass
class AscentState(SearchState):
    """The state of a search that keeps the iterate with the largest objective."""

    best_x: Tensor
    best_value: Tensor

    @property
    def best(self) -> tuple[Tensor, Tensor]:
        return self.best_x, self.best_value


S = TypeVar("S", bound=SearchState)


@dataclass
class Best:
    """The best example of each image so far."""

    x_adv: Tensor
    value: Tensor  # by which examples are compared, N; -inf before the first example

    def set(self, rows: Tensor, x_adv: Tensor, value: Tensor) -> None:
        self.x_adv[rows], self.value[rows] = x_adv, value.to(self.value)

    def keep_better(self, rows: Tensor, new: "Found", by_value: bool = True) -> None:
        """Store the examples of the given rows that succeed or, `by_value`, have a larger value."""
        better = new.success | (new.value > self.value[rows]) if by_value else new.success
        better = better.nonzero()[:, 0]
        self.set(rows[better], new.x_adv[better], new.value[better])


@dataclass
class Found(Best):
    """The best example of each image so far, and the images on which an attack succeeded."""

    success: Tensor  # verified, N, bool; these images are no longer attacked

    @classmethod
    def nothing(cls, batch: AttackBatch, success: Tensor | None = None) -> "Found":
        """Return the clean images, without a value; `success` marks images not to attack."""
        value = torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
        none = torch.zeros_like(batch.y, dtype=torch.bool)
        return cls(batch.x.clone(), value, none if success is None else success)

    def attempts(self, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each attempt, such as a restart, and the rows without success."""
        for number in range(count):
            rows = (~self.success).nonzero()[:, 0]
            if len(rows) == 0:
                return
            yield number, rows

    def add(self, rows: Tensor, new: "Found") -> None:
        """Store the successful examples of an attempt on these rows, else those of larger value."""
        self.keep_better(rows, new)
        self.success[rows] = new.success


@dataclass(frozen=True)
class IterativeAttack(Attack, ABC, Generic[S]):
    """An attack that goes from iterate to iterate; its subclasses supply the state and the step."""

    # Whether the state keeps a candidate until its verification, so that the driver need not.
    keeps_candidates: ClassVar[bool] = False

    @abstractmethod
    def begin(self, batch: AttackBatch) -> tuple[AttackBatch, S]:
        """Return the state at the first iterate, and the batch with the objective's state."""

    @abstractmethod
    def step(self, batch: AttackBatch, state: S, step: int) -> S:
        """Return the state at the next iterate; `step` counts from 0."""

    @property
    def last_step(self) -> int:
        """The number of steps after the first iterate: the field `steps`."""
        return self._field("steps", 0)

    def settle(
        self, batch: AttackBatch, state: S, verified: Candidates
    ) -> tuple[S, Candidates | None]:
        """Return the state after a verification, and the examples with which images leave, if any.

        By default an image leaves with its first verified success.
        """
        return state, verified

    def verification_interval(self, model: AttackModel) -> int:
        """Return the number of steps between verifications."""
        return 1

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        return self.iterate(*self.begin(replace(batch, stream=stream))).x_adv

    def iterate(self, batch: AttackBatch, state: S) -> Found:
        """Run all steps from a first state; return successes, else the best iterates."""
        found, rows = Found.nothing(batch), torch.arange(len(batch.x), device=batch.x.device)
        candidates, interval = Candidates.empty(batch.x), self.verification_interval(batch.model)
        for step in range(self.last_step + 1):
            verifies = step % interval == 0 or step == self.last_step
            if verifies or not self.keeps_candidates:
                candidates = candidates.update(state.x_adv, state.value, state.candidate)
            if verifies:
                given = candidates.x_adv, batch.y, candidates.present
                present = verify_success(self.success_criterion, batch.model, *given)
                verified = replace(candidates, present=present)
                state, leaving = self.settle(batch, state, verified)
                # Index by rows: each use of a boolean mask makes the host wait for the GPU.
                if leaving is not None and len(done := leaving.present.nonzero()[:, 0]):
                    found.set(rows[done], leaving.x_adv[done], leaving.value[done])
                    found.success[rows[done]] = True
                    left = (~leaving.present).nonzero()[:, 0]
                    rows, state, batch = rows[left], state.select(left), batch.select(left)
                candidates = Candidates.empty(batch.x)
            if step == self.last_step or len(rows) == 0:
                break
            state = self.step(batch, state, step)
            progress.report(step + 1, self.last_step)
        found.set(rows, *state.best)
        return found

    def best_restart(
        self, batch: AttackBatch, found: Found, restarts: int, stream: Stream
    ) -> Tensor:
        """Return the best examples of several restarts on the images without success."""
        for number, rows in found.attempts(restarts):
            own = replace(batch.select(rows), stream=noise.derive_seed(stream, number))
            with progress.part(number, restarts):
                new = self.iterate(*self.begin(own))
            found.add(rows, new)
        return found.x_adv


def clean_success(criterion: Criterion, batch: AttackBatch) -> Tensor:
    """Return on which clean images the criterion holds already, verified, N, bool."""
    _, out = batch.model.value(CE(), batch.x, batch.y)
    return verify_success(criterion, batch.model, batch.x, batch.y, criterion(out, batch.y))


def default_interval(model: AttackModel) -> int:
    """Return the number of steps between verifications; an exact model needs no extra pass."""
    return 1 if model.exact else model.verify_every


def verify_success(
    criterion: Criterion, model: AttackModel, x_adv: Tensor, y: Tensor, candidate: Tensor
) -> Tensor:
    """Return which candidates satisfy the criterion in an exact forward pass in fp32, N, bool.

    For an exact model the candidates are successes already and are returned as they are.
    """
    if model.exact:
        return candidate
    rows = candidate.nonzero()[:, 0]  # the only host-device synchronisation without candidates
    if len(rows) == 0:
        return candidate
    with torch.no_grad(), use_precision("fp32", x_adv.device):
        confirmed = criterion(as_output(model(x_adv[rows])), y[rows])
    return candidate.index_put((rows,), confirmed)
