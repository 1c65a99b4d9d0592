"""What all attacks share: restarts, images that leave, verified successes, the best example.

A fast model may compute in bf16. An iterate that satisfies the success criterion there is only a
*candidate*, until an exact forward pass in fp32 confirms it. The closest adversarial example lies
on the decision boundary, where batch size, TF32 and the algorithm of cuDNN decide the prediction.
Minimum-distance attacks move it outward until its margins exceed what such passes differ by.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from demur import noise, progress
from demur.attacks.attack import (
    AcceptedError,
    Attack,
    AttackBatch,
    Criterion,
    Rejected,
    RuleCriterion,
)
from demur.attacks.attack_model import AttackModel, Model
from demur.attacks.objectives.classification import CE, best_wrong
from demur.attacks.objectives.rejector import best_wrong_class
from demur.images import per_image
from demur.noise import Stream
from demur.numerics import tf32, use_precision
from demur.output import Output, as_output, label_entry, prediction


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


SLACK = 1e-5  # relative, on logits and thresholds: what passes in fp32 may differ by
PARTS = (1, 2, 8)  # batches into which the images of a pass are split
SAFETY = 2.0  # times the largest difference that was measured
# How far beyond the found example to look, as multiples of its distance. The last ones are for
# clean images on the boundary itself, whose examples are nearly at distance zero.
LADDER = (0.0, *(2.0**power for power in range(-16, 9)))


@dataclass(frozen=True)
class SuccessMargins:
    """The margins by which an attack has succeeded: the logit margin and those of the scores."""

    criterion: Criterion
    confidence: float = 0.0  # the required logit margin

    def holds(self, out: Output, y: Tensor, *target: Tensor) -> Tensor:
        """Return on which images the attack has succeeded, N, bool."""
        success = self.criterion(out, y)
        if self.confidence == 0 or isinstance(self.criterion, Rejected):
            return success
        return success & (logit_margin(out, y, *target) >= self.confidence)

    def margins(self, out: Output, y: Tensor, *target: Tensor) -> Tensor:
        """Return the margins less SLACK, N, M; at a success all of them are positive."""
        slack = SLACK * out.logits.detach().abs().nan_to_num(posinf=0).amax(-1)  # -inf: masked
        margin = logit_margin(out, y, *target)[:, None] - (self.confidence + slack)[:, None]
        if not isinstance(self.criterion, RuleCriterion):
            return margin
        if isinstance(self.criterion, Rejected):  # for any prediction
            return self._decision(out, self.criterion, prediction(out))
        label = target[0] if target else best_wrong_class(out.logits, y)
        return torch.cat((margin, self._decision(out, self.criterion, label)), 1)

    def __call__(
        self, out: Output, y: Tensor, needed: Tensor | None = None, *target: Tensor
    ) -> Tensor:
        """Return the hinge loss of C&W: what the margins lack, in sum, N; 0 at a success."""
        margins = self.margins(out, y, *target)
        return (-margins if needed is None else needed - margins).clamp_min(0).sum(1)

    def _decision(self, out: Output, criterion: RuleCriterion, label: Tensor) -> Tensor:
        """Return the margins of the decision; one low score is enough to reject."""
        sign = 1 if isinstance(criterion, AcceptedError) else -1
        each = [
            sign * score.accept_margin(out, t, label) - SLACK * max(1, abs(t))
            for score, t in criterion.accept_rule.pairs
        ]
        stacked = torch.stack(each, 1)
        return stacked if sign > 0 else stacked.amax(1, keepdim=True)


def logit_margin(out: Output, y: Tensor, *target: Tensor) -> Tensor:
    """Return the margin of the target over the other logits, or of the best wrong class, N."""
    if target:
        return label_entry(out.logits, target[0]) - best_wrong(out.logits, target[0])
    return best_wrong(out.logits, y) - label_entry(out.logits, y)


def rounding_margins(
    success: SuccessMargins, model: Model, x: Tensor, y: Tensor, *target: Tensor
) -> tuple[Tensor, Tensor]:
    """Return margins that rounding does not undo, N, M, and where success is safe already, N, bool.

    The margins are the same for all images, and zero where passes differ by less than SLACK.
    """
    margins, holds = _all_passes(success, model, x, y, *target)
    spread = SAFETY * (margins.amax(0) - margins.amin(0)).nan_to_num().amax(0)  # M
    scale = margins.abs().nan_to_num(posinf=0).amax((0, 1))
    needed = torch.where(spread > SLACK * scale, spread, 0).expand(len(x), -1)
    return needed, holds & (margins.amin(0) >= needed - SLACK * scale).all(1)


def confirmed_outward(
    success: SuccessMargins, model: Model, x: Tensor, x_adv: Tensor, needed: Tensor, y: Tensor,
    *target: Tensor, inside: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return examples that succeed in every pass, and for which images there is one, N, bool.

    An example moves outward by the first step of LADDER at which it has the margins `needed`, N, M,
    from `rounding_margins`. Where there is none, the closest one that succeeds in every pass is
    taken. Other images are returned clean. `target` is the class that should be predicted, if there
    is one; `inside` says whether an example (x, x_adv) may be returned, N, bool, and None allows
    all.
    """
    result, confirmed = x.clone(), torch.zeros_like(y, dtype=torch.bool)
    rows = torch.arange(len(x), device=x.device)  # without a safe example so far
    for step in LADDER:
        moved = (x[rows] + (1 + step) * (x_adv[rows] - x[rows])).clamp(0, 1)
        moved = moved if step else x_adv[rows]
        labels = y[rows], *(part[rows] for part in target)
        margins, holds = _all_passes(success, model, moved, *labels)
        allowed = torch.ones_like(holds) if inside is None else inside(x[rows], moved)
        safe = allowed & holds & (margins.amin(0) >= needed[rows]).all(1)
        taken = safe | (allowed & holds & ~confirmed[rows])
        result[rows[taken]], confirmed[rows[taken]] = moved[taken], True
        rows = rows[allowed & ~safe]
        if len(rows) == 0:
            break
    return result, confirmed


def _all_passes(
    success: SuccessMargins, model: Model, x: Tensor, y: Tensor, *target: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the margins of each pass, P, N, M, and which images succeed in all of them, N."""
    margins, holds = [], torch.ones_like(y, dtype=torch.bool)
    for out in _passes(model, x):
        margins.append(success.margins(out, y, *target))
        holds &= success.holds(out, y, *target)
    return torch.stack(margins), holds


def _passes(model: Model, x: Tensor) -> Iterator[Output]:
    """Yield outputs as the user computes them, and with and without TF32 at other batch sizes."""
    with torch.no_grad():
        yield as_output(model(x))
        for precision in ("fp32", "tf32"):
            with tf32(precision):
                for parts in PARTS:
                    outs = [as_output(model(part)) for part in x.chunk(parts)]
                    yield Output(*(torch.cat(column) for column in zip(*outs, strict=True)))
