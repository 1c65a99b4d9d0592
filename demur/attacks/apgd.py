"""Auto-PGD: gradient ascent with momentum and adaptive step size (Croce and Hein 2020).

Unlike in the authors' code an image leaves at its first success, and its noise does not depend on
the batch. In L1 (Croce and Hein 2021) steps are sparse and without momentum, and the first ones
leave the ball.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from demur.attacks.attack import AttackBatch, Criterion, Misclassified
from demur.attacks.attack_model import AttackModel, Gradient
from demur.attacks.balls import L1, MAX_EPS, Ball
from demur.attacks.driver import (
    AscentState,
    Found,
    IterativeAttack,
    clean_success,
    default_interval,
)
from demur.attacks.objectives.classification import CE, Objective
from demur.images import per_image
from demur.noise import Stream
from demur.spec.field_types import NonNegativeInt, PositiveInt, UnitInterval

# Gaps between checkpoints, as fractions of all steps: the first, its decrement, the smallest.
FIRST_GAP, GAP_DECREMENT, MIN_GAP = 0.22, 0.03, 0.06
# L1: radii of the first phases as multiples of eps, and the share of the steps of each.
RADII, PHASE_SHARE = (3, 2), 0.3
L1_GAP = 0.04  # between checkpoints, as a fraction of the steps of a phase
FEWER = 1.5  # divides the number of changed pixels, and the step size while it does not fall
FALLS, SMALLEST_STEP = 0.95, 0.1  # ratio of changed pixels that is a fall; least step, of eps


@dataclass
class APGDState(AscentState):
    """The state of the ascent; every tensor has one row per image."""

    previous: Tensor  # iterate
    grad: Tensor  # at x_adv
    best_grad: Tensor
    step_size: Tensor
    rises: Tensor  # steps since the last checkpoint that raised the objective
    best_at_checkpoint: Tensor  # best_value at the last checkpoint
    halved: Tensor  # whether the last checkpoint halved the step size
    changed: Tensor  # L1: pixels that the best iterate changes, at the last checkpoint


@dataclass(frozen=True)
class APGD(IterativeAttack[APGDState]):
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
        success = None if self.keep == "max_objective" else clean_success(self.criterion, batch)
        return self.best_restart(batch, Found.nothing(batch, success), self.restarts, stream)

    @property
    def last_step(self) -> int:
        return self.steps - len(RADII) * self._phase_steps

    @property
    def _phase_steps(self) -> int:
        """The steps in each ball of a larger radius, which only attacks in L1 have."""
        return int(PHASE_SHARE * self.steps) if isinstance(self.ball, L1) else 0

    def verification_interval(self, model: AttackModel) -> int:
        return default_interval(model)

    def begin(self, batch: AttackBatch) -> tuple[AttackBatch, APGDState]:
        radii = [min(radius * self.ball.eps, MAX_EPS) for radius in RADII if self._phase_steps]
        widest = L1(radii[0]) if radii else self.ball
        x_adv = widest.scaled_start(batch.x, self.seed, batch.index, batch.stream)
        batch = batch.prepare(self.objective, x_adv)
        for radius in radii:
            wide = replace(self, ball=L1(radius))
            state = wide._begin_at(batch, wide.ball.project(batch.x, x_adv))
            for step in range(self._phase_steps):
                state = wide.step(batch, state, step)
            x_adv = state.best_x
        return batch, self._begin_at(batch, self.ball.project(batch.x, x_adv))

    def _begin_at(self, batch: AttackBatch, x_adv: Tensor) -> APGDState:
        (grad, value, _), candidate = self._query(batch, x_adv, 0)
        size = self.ball.eps if isinstance(self.ball, L1) else 2 * self.ball.eps
        return APGDState(
            x_adv=x_adv, value=value, candidate=candidate, previous=x_adv, grad=grad,
            best_x=x_adv, best_grad=grad, best_value=value,
            step_size=torch.full_like(value, size), rises=torch.zeros_like(value),
            best_at_checkpoint=value, halved=torch.ones_like(batch.y, dtype=torch.bool),
            changed=_changed(batch.x, x_adv),
        )  # fmt: skip

    def step(self, batch: AttackBatch, state: APGDState, step: int) -> APGDState:
        # Not before the iterate has been tested: a success need not have the largest objective.
        s, gap = state, _checkpoint_gaps(self.steps).get(step)
        if not isinstance(self.ball, L1):
            s = self._checkpoint(s, gap) if gap else s
        elif step and step % max(1, int(L1_GAP * self.last_step)) == 0:
            s = self._sparser(batch.x, s)
        x_adv = self._moved(batch.x, s, step)
        (grad, value, _), candidate = self._query(batch, x_adv, step + 1)
        better = value > s.best_value
        mask = per_image(better, x_adv)
        return replace(
            s, x_adv=x_adv, value=value, candidate=candidate, previous=s.x_adv, grad=grad,
            best_x=torch.where(mask, x_adv, s.best_x),
            best_grad=torch.where(mask, grad, s.best_grad),
            best_value=torch.where(better, value, s.best_value),
            rises=s.rises + (value > s.value).to(value.dtype),
        )  # fmt: skip

    def _moved(self, x: Tensor, s: APGDState, step: int) -> Tensor:
        size, ball = per_image(s.step_size, x), self.ball
        if isinstance(ball, L1):
            share = s.changed / (FEWER * x[0].numel())
            return ball.project(x, s.x_adv + size * ball.sparse_direction(s.grad, share))
        momentum = 0.25 if step else 0.0
        z = ball.project(x, s.x_adv + size * ball.direction(s.grad))
        x_adv = s.x_adv + (1 - momentum) * (z - s.x_adv) + momentum * (s.x_adv - s.previous)
        return ball.project(x, x_adv)

    def _sparser(self, x: Tensor, s: APGDState) -> APGDState:
        """Return to the best iterate where it changes fewer pixels, else lower the step (L1)."""
        changed, eps = _changed(x, s.best_x), self.ball.eps
        fewer = changed < FALLS * s.changed
        smaller = (s.step_size / FEWER).clamp_min(SMALLEST_STEP * eps)
        mask = per_image(fewer, x)
        return replace(
            s, x_adv=torch.where(mask, s.best_x, s.x_adv), changed=changed,
            grad=torch.where(mask, s.best_grad, s.grad),
            step_size=torch.where(fewer, eps, smaller),
        )  # fmt: skip

    def _checkpoint(self, s: APGDState, since_checkpoint: int) -> APGDState:
        """Halve the step size and return to the best iterate where the ascent is too slow."""
        stuck = ~s.halved & (s.best_at_checkpoint >= s.best_value)
        halve = (s.rises <= self.rho * since_checkpoint) | stuck
        mask = per_image(halve, s.x_adv)
        # `value` stays that of the last iterate: the next rise is counted from it, as in the
        # authors' code.
        return replace(
            s, x_adv=torch.where(mask, s.best_x, s.x_adv),
            grad=torch.where(mask, s.best_grad, s.grad),
            step_size=torch.where(halve, s.step_size / 2, s.step_size),
            rises=torch.zeros_like(s.rises), best_at_checkpoint=s.best_value, halved=halve,
        )  # fmt: skip

    def _query(self, batch: AttackBatch, x_adv: Tensor, step: int) -> tuple[Gradient, Tensor]:
        """Return the mean of `eot_iter` gradients, and the candidate successes of the last one."""
        inputs = self.objective.at_step(batch.objective_state, step, self.steps)
        queries = [
            batch.model.gradient(self.objective, x_adv, batch.y, *inputs)
            for _ in range(self.eot_iter)
        ]
        last = queries[-1]
        if self.eot_iter > 1:
            last = last._replace(grad=torch.stack([query.grad for query in queries]).mean(0))
        if self.keep == "max_objective":
            return last, torch.zeros_like(batch.y, dtype=torch.bool)
        return last, self.criterion(last.out, batch.y)


@cache
def _checkpoint_gaps(steps: int) -> dict[int, int]:
    """Return the steps after which there is a checkpoint, with the steps since the one before."""
    gap, decrement, smallest = (
        max(1, int(fraction * steps)) for fraction in (FIRST_GAP, GAP_DECREMENT, MIN_GAP)
    )
    gaps, step = {}, gap
    while step <= steps:
        gaps[step] = gap
        gap = max(gap - decrement, smallest)
        step += gap
    return gaps


def _changed(x: Tensor, x_adv: Tensor) -> Tensor:
    return (x_adv != x).flatten(1).sum(1).to(x)
