"""Auto-PGD: gradient ascent with momentum and adaptive step size (Croce and Hein 2020).

    APGD(Linf(8/255), objective=DLR())

At checkpoints the step size of an image is halved if its objective rose in too few steps or its
best value did not improve. The image then restarts from its best iterate. Unlike in the authors'
code an image leaves at its first success, and its noise does not depend on the batch.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from demur.attacks.attack import Attack
from demur.attacks.batch import (
    AttackBatch,
    Candidates,
    PerImageState,
    verification_interval,
    verify_success,
)
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.objectives import CE, AttackStart, Objective, ObjectiveState
from demur.attacks.restarts import best_of_restarts
from demur.balls import Ball
from demur.field_types import NonNegativeInt, PositiveInt, UnitInterval
from demur.gradient import Gradient, approximate_value, gradient
from demur.images import per_image
from demur.noise import Stream

# Gaps between checkpoints, as fractions of all steps: the first, its decrement, the smallest.
FIRST_GAP, GAP_DECREMENT, MIN_GAP = 0.22, 0.03, 0.06


@dataclass
class APGDState(PerImageState):
    """The state of the ascent; every tensor has one row per image."""

    x_adv: Tensor
    previous: Tensor  # iterate
    grad: Tensor  # at x_adv
    value: Tensor  # of the objective at x_adv
    best: Tensor  # iterate with the largest objective
    best_grad: Tensor
    best_value: Tensor
    step_size: Tensor
    rises: Tensor  # steps since the last checkpoint that raised the objective
    best_at_checkpoint: Tensor  # best_value at the last checkpoint
    halved: Tensor  # whether the last checkpoint halved the step size


@dataclass(frozen=True)
class APGD(Attack):
    """Auto-PGD, an attack without a step size to choose.

    Args:
        ball: Where adversarial examples may lie, for instance Linf(8/255).
        steps: The number of steps per restart.
        restarts: The number of restarts; each attacks the images without success so far.
        objective: What the attack maximises.
        keep: "success" returns the first iterate that satisfies the criterion, else the iterate
            with the largest objective. "max_objective" always returns the latter.
        criterion: The success criterion.
        rho: Halve the step size if at most this fraction of the steps raised the objective.
        eot_iter: The number of gradients to average, for randomised models (EOT).
        seed: The seed of the random starts.

    Example:
        >>> import torch
        >>> from demur import APGD, DLR, Linf
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = APGD(Linf(8 / 255), steps=20, objective=DLR())
        >>> x_adv = attack(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    ball: Ball
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    objective: Objective = CE()
    keep: Literal["max_objective", "success"] = "success"
    criterion: Criterion = Misclassified()
    rho: UnitInterval = 0.75
    eot_iter: PositiveInt = 1
    seed: NonNegativeInt = 0

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        return best_of_restarts(batch, self._to_attack(batch), self.restarts, stream, self._restart)

    def _to_attack(self, batch: AttackBatch) -> Tensor:
        """Return which images to attack: all, or those whose clean image is no success."""
        if self.keep == "max_objective":
            return torch.ones_like(batch.y, dtype=torch.bool)
        _, out = approximate_value(batch.model, CE(), batch.x, batch.y)
        return ~verify_success(
            self.criterion, batch.model, batch.x, batch.y, self.criterion(out, batch.y)
        )

    def _restart(self, batch: AttackBatch, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Run one restart; return examples, their objective values and verified success."""
        x_start = self.ball.scaled_start(batch.x, self.seed, batch.index, stream)
        objective_state = self.objective.prepare(
            AttackStart(batch.model, batch.x, x_start, batch.y, batch.target)
        )
        best, values = batch.x.clone(), torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
        success = torch.zeros_like(batch.y, dtype=torch.bool)
        rows = torch.arange(len(batch.x), device=batch.x.device)  # of the images still attacked
        state, candidate = self._initial_state(batch, x_start, objective_state)
        checkpoints, interval = _checkpoints(self.steps), verification_interval(batch.model)
        candidates, since_checkpoint = Candidates.empty(batch.x), 0
        for step in range(self.steps + 1):
            candidates = candidates.update(state.x_adv, state.value, candidate)
            if step % interval == 0 or step == self.steps:
                verified = candidates.verify(self.criterion, batch)
                # Index by rows: each use of a boolean mask makes the host wait for the GPU.
                if len(done := verified.nonzero()[:, 0]):
                    best[rows[done]] = candidates.x_adv[done]
                    values[rows[done]] = candidates.value[done]
                    success[rows[done]] = True
                    left = (~verified).nonzero()[:, 0]
                    rows, state, batch = rows[left], state.select(left), batch.select(left)
                    objective_state = tuple(part[left] for part in objective_state)
                candidates = Candidates.empty(batch.x)
            if step == self.steps or len(rows) == 0:
                break
            state, candidate = self._step(state, batch, objective_state, step)
            since_checkpoint += 1
            if step + 1 in checkpoints:
                state = self._checkpoint(state, since_checkpoint)
                since_checkpoint = 0
        best[rows], values[rows] = state.best, state.best_value
        return best, values, success

    def _initial_state(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState
    ) -> tuple[APGDState, Tensor]:
        """Return the state at the first iterate, and which iterates are candidate successes."""
        (grad, value, _), candidate = self._query(batch, x_adv, objective_state, 0)
        state = APGDState(
            x_adv=x_adv, previous=x_adv, grad=grad, value=value, best=x_adv, best_grad=grad,
            best_value=value, step_size=torch.full_like(value, 2 * self.ball.eps),
            rises=torch.zeros_like(value), best_at_checkpoint=value,
            halved=torch.ones_like(batch.y, dtype=torch.bool),
        )  # fmt: skip
        return state, candidate

    def _step(
        self, s: APGDState, batch: AttackBatch, objective_state: ObjectiveState, step: int
    ) -> tuple[APGDState, Tensor]:
        """Take one step with momentum; return the state and the candidate successes."""
        momentum = 0.25 if step else 0.0
        z = s.x_adv + per_image(s.step_size, s.x_adv) * self.ball.direction(s.grad)
        z = self.ball.project(batch.x, z)
        x_adv = s.x_adv + (1 - momentum) * (z - s.x_adv) + momentum * (s.x_adv - s.previous)
        x_adv = self.ball.project(batch.x, x_adv)
        (grad, value, _), candidate = self._query(batch, x_adv, objective_state, step + 1)
        better = value > s.best_value
        mask = per_image(better, x_adv)
        return replace(
            s, x_adv=x_adv, previous=s.x_adv, grad=grad, value=value,
            best=torch.where(mask, x_adv, s.best), best_grad=torch.where(mask, grad, s.best_grad),
            best_value=torch.where(better, value, s.best_value),
            rises=s.rises + (value > s.value).to(value.dtype),
        ), candidate  # fmt: skip

    def _checkpoint(self, s: APGDState, since_checkpoint: int) -> APGDState:
        """Halve the step size and return to the best iterate where the ascent is too slow."""
        stuck = ~s.halved & (s.best_at_checkpoint >= s.best_value)
        halve = (s.rises <= self.rho * since_checkpoint) | stuck
        mask = per_image(halve, s.x_adv)
        # `value` stays that of the last iterate: the next rise is counted from it, as in the
        # authors' code.
        return replace(
            s, x_adv=torch.where(mask, s.best, s.x_adv),
            grad=torch.where(mask, s.best_grad, s.grad),
            step_size=torch.where(halve, s.step_size / 2, s.step_size),
            rises=torch.zeros_like(s.rises), best_at_checkpoint=s.best_value, halved=halve,
        )  # fmt: skip

    def _query(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState, step: int
    ) -> tuple[Gradient, Tensor]:
        """Return the mean of `eot_iter` gradients, and the candidate successes of the last one."""
        inputs = self.objective.at_step(objective_state, step, self.steps)
        queries = [
            gradient(batch.model, self.objective, x_adv, batch.y, *inputs)
            for _ in range(self.eot_iter)
        ]
        grad = queries[0].grad
        if self.eot_iter > 1:
            grad = torch.stack([query.grad for query in queries]).mean(0)
        last = Gradient(grad, queries[-1].value, queries[-1].out)
        if self.keep == "max_objective":
            return last, torch.zeros_like(batch.y, dtype=torch.bool)
        return last, self.criterion(last.out, batch.y)


def _checkpoints(steps: int) -> set[int]:
    """Return the numbers of steps after which there is a checkpoint."""
    gap, decrement, smallest = (
        max(1, int(fraction * steps)) for fraction in (FIRST_GAP, GAP_DECREMENT, MIN_GAP)
    )
    checkpoints, step = set(), gap
    while step <= steps:
        checkpoints.add(step)
        gap = max(gap - decrement, smallest)
        step += gap
    return checkpoints
