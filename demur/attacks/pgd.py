"""Projected gradient descent (Madry et al. 2018) on any objective, in any ball.

    PGD(Linf(8/255), steps=100, step_size=2/255, restarts=10)
    PGD(Linf(8/255), steps=100, objective=PlusLogScore(RCon()), keep="success", criterion=criterion)

Noise depends on the index of the image, not on a global generator. Momentum, backtracking and the
starts "mixed" and "coin" follow CCAT (Stutz et al. 2020). `FrankWolfe` is the step of GAMA-FW.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch, verify_success
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.momentum import initial_state, keep_or_undo_step, propose_step
from demur.attacks.objectives import CE, AttackStart, Objective, ObjectiveState
from demur.balls import Ball
from demur.errors import BadInput
from demur.field_types import NonNegative, NonNegativeInt, Positive, PositiveInt, UnitInterval
from demur.gradient import approximate_value, exact_value, gradient, gradient_only
from demur.images import per_image
from demur.noise import Stream
from demur.spec import later

TRADES_SIGMA = 1e-3  # standard deviation of the noise that TRADES starts with


@dataclass(frozen=True)
class PGD(Attack):
    """Projected gradient descent: ascend the objective and project into the ball.

    Args:
        ball: Where adversarial examples may lie, for instance Linf(8/255).
        steps: The number of gradient queries per restart.
        step_size: The size of a step; None is eps / 4, the paper's 2/255 at eps = 8/255.
        restarts: The number of restarts.
        start: The first iterate. "random": uniform in the ball. "clean": the image. "signs": a
            random corner. "near": Gaussian noise of sigma 0.001 (TRADES). "mixed", "coin": see
            `Ball.mixed_start` and `Ball.ray_or_clean_start` (CCAT).
        objective: What the attack maximises.
        keep: "max_objective" runs all restarts on all images and returns the last iterate with
            the largest objective. "success" returns the first iterate that satisfies the
            criterion, else the iterate with the largest objective; successes leave the batch.
        criterion: The success criterion, used by keep="success".
        seed: The seed of the random starts.
        decay_steps: The steps at which the step size is multiplied by `decay_factor`.
        decay_factor: See `decay_steps`.
        momentum: The weight of earlier directions in the moving average of directions.
        backtrack: Undo a step that lowers the objective and divide the step size by this number;
            0 disables it.
        backtrack_objective: Decides on backtracking in place of `objective`.

    Example:
        >>> import torch
        >>> from demur import PGD, Linf
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = PGD(Linf(8 / 255), steps=10, step_size=2 / 255)
        >>> x_adv = attack(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    ball: Ball
    steps: PositiveInt = 10
    step_size: Positive | None = None
    restarts: PositiveInt = 1
    start: Literal["random", "clean", "signs", "near", "mixed", "coin"] = "random"
    objective: Objective = CE()
    keep: Literal["max_objective", "success"] = "max_objective"
    criterion: Criterion = Misclassified()
    seed: NonNegativeInt = 0
    decay_steps: tuple[PositiveInt, ...] = field(default=(), metadata=later(neutral=()))
    decay_factor: UnitInterval = field(default=0.1, metadata=later(neutral=0.1))
    momentum: UnitInterval = field(default=0.0, metadata=later(neutral=0.0))
    backtrack: NonNegative = field(default=0.0, metadata=later(neutral=0.0))
    backtrack_objective: Objective | None = field(default=None, metadata=later(neutral=None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._has_momentum and self.keep == "success":
            raise BadInput(
                "momentum and backtrack work with keep=max_objective only, not with keep=success"
            )
        if self.momentum == 1:
            raise BadInput("PGD.momentum must be below 1; with 1 no image ever moves")
        if 0 < self.backtrack <= 1:
            raise BadInput(
                f"PGD.backtrack must be above 1, or 0 to disable it, not {self.backtrack}"
            )
        if self.backtrack_objective is not None and not self.backtrack:
            raise BadInput(
                "PGD.backtrack_objective has no effect without backtrack; set backtrack=1.5"
            )

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        if self.keep == "max_objective":
            return self._max_objective(batch, stream)
        return self._until_success(batch, stream)

    def _max_objective(self, batch: AttackBatch, stream: Stream) -> Tensor:
        best, best_value = batch.x, torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
        for restart in range(self.restarts):
            x_adv, objective_state = self._start_restart(batch, noise.derive_seed(stream, restart))
            ranking, inputs = self._ranking_objective(batch, x_adv, objective_state)
            if self._has_momentum:
                x_adv = self._momentum_ascent(batch, x_adv, objective_state, ranking, inputs)
            else:
                x_adv = self._plain_ascent(batch, x_adv, objective_state)
            if self.restarts == 1:
                return x_adv  # the reference code evaluates the loss once more, to no effect
            value, _ = exact_value(batch.model, ranking, x_adv, batch.y, *inputs)
            better = value >= best_value
            best = torch.where(per_image(better, batch.x), x_adv, best)
            best_value = torch.where(better, value, best_value)
        return best

    def _plain_ascent(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState
    ) -> Tensor:
        """Return the last iterate."""
        for step in range(self.steps):
            inputs = self.objective.at_step(objective_state, step, self.steps)
            grad = gradient_only(batch.model, self.objective, x_adv, batch.y, *inputs)
            x_adv = self.next_iterate(batch.x, x_adv, grad, step)
        return x_adv

    def _momentum_ascent(
        self,
        batch: AttackBatch,
        x_adv: Tensor,
        objective_state: ObjectiveState,
        ranking: Objective,
        ranking_inputs: ObjectiveState,
    ) -> Tensor:
        """Return the last iterate; with backtracking it has the largest value of `ranking`."""
        # As in the reference code, a separate backtracking objective does not evaluate the start,
        # and a tie shortens the step.
        strict, value = self.backtrack_objective is not None, None
        if self.backtrack and not strict:
            value, _ = approximate_value(batch.model, ranking, x_adv, batch.y, *ranking_inputs)
        state = initial_state(x_adv, self._step_size, value)
        for step in range(self.steps):
            inputs = self.objective.at_step(objective_state, step, self.steps)
            grad = gradient_only(batch.model, self.objective, state.x_adv, batch.y, *inputs)
            decay = self._decay(step)
            x_next, mean = propose_step(self.ball, batch.x, state, grad, self.momentum, decay)
            state = state._replace(mean=mean)
            if self.backtrack:
                value, _ = approximate_value(batch.model, ranking, x_next, batch.y, *ranking_inputs)
                state = keep_or_undo_step(state, x_next, value, self.backtrack, strict)
            else:
                state = state._replace(x_adv=x_next)
        return state.x_adv

    @property
    def _has_momentum(self) -> bool:
        """Whether a step depends on more than the current iterate."""
        return bool(self.momentum or self.backtrack)

    def _ranking_objective(
        self, batch: AttackBatch, x_start: Tensor, objective_state: ObjectiveState
    ) -> tuple[Objective, ObjectiveState]:
        """Return the objective that ranks iterates, with its inputs at the last step."""
        ranking = self.objective
        if self.backtrack_objective is not None:
            ranking = self.backtrack_objective
            objective_state = ranking.prepare(
                AttackStart(batch.model, batch.x, x_start, batch.y, batch.target)
            )
        return ranking, ranking.at_step(objective_state, self.steps, self.steps)

    def _until_success(self, full_batch: AttackBatch, stream: Stream) -> Tensor:
        model, best = full_batch.model, full_batch.x.clone()
        best_value, to_attack = self._evaluate_clean(full_batch)
        for restart in range(self.restarts):
            rows = to_attack.nonzero()[:, 0]
            batch = full_batch.select(rows)
            x_adv, objective_state = self._start_restart(batch, noise.derive_seed(stream, restart))
            for step in range(self.steps + 1):
                if len(rows) == 0:
                    return best
                inputs = self.objective.at_step(objective_state, step, self.steps)
                if step < self.steps:
                    grad, value, out = gradient(model, self.objective, x_adv, batch.y, *inputs)
                else:
                    value, out = exact_value(model, self.objective, x_adv, batch.y, *inputs)
                candidate = self.criterion(out, batch.y)
                success = verify_success(self.criterion, model, x_adv, batch.y, candidate)
                better = success | (value > best_value[rows])
                best[rows[better]] = x_adv[better]
                best_value[rows[better]] = value[better]
                to_attack[rows[success]] = False
                left = ~success
                rows, x_adv, batch = rows[left], x_adv[left], batch.select(left)
                objective_state = tuple(part[left] for part in objective_state)
                if step < self.steps:
                    x_adv = self.next_iterate(batch.x, x_adv, grad[left], step)
        return best

    def _evaluate_clean(self, batch: AttackBatch) -> tuple[Tensor, Tensor]:
        """Return the objective's value at the clean images, and where the criterion fails."""
        objective_state = self.objective.prepare(
            AttackStart(batch.model, batch.x, batch.x, batch.y, batch.target)
        )
        inputs = self.objective.at_step(objective_state, self.steps, self.steps)
        value, out = exact_value(batch.model, self.objective, batch.x, batch.y, *inputs)
        return value, ~self.criterion(out, batch.y)

    def _start_restart(self, batch: AttackBatch, stream: Stream) -> tuple[Tensor, ObjectiveState]:
        """Return the first iterate of a restart and the state of the objective."""
        x_start = self._first_iterate(batch.x, batch.index, stream)
        return x_start, self.objective.prepare(
            AttackStart(batch.model, batch.x, x_start, batch.y, batch.target)
        )

    def _first_iterate(self, x: Tensor, index: Tensor, stream: Stream) -> Tensor:
        if self.start == "clean":
            return x
        if self.start == "signs":
            return self.ball.corner_start(x, self.seed, index, stream)
        if self.start == "near":
            return self.ball.start_near(x, TRADES_SIGMA, self.seed, index, stream)
        if self.start == "mixed":
            return self.ball.mixed_start(x, self.seed, index, stream)
        if self.start == "coin":
            return self.ball.ray_or_clean_start(x, self.seed, index, stream)
        return self.ball.start(x, self.seed, index, stream)

    def next_iterate(self, x: Tensor, x_adv: Tensor, grad: Tensor, step: int) -> Tensor:
        """Return the projected iterate after one step."""
        return self.ball.step(x, x_adv, grad, self._step_size * self._decay(step))

    @property
    def _step_size(self) -> float:
        return self.ball.eps / 4 if self.step_size is None else self.step_size

    def _decay(self, step: int) -> float:
        """Return the factor of the step size at a step."""
        return float(self.decay_factor ** sum(step >= drop for drop in self.decay_steps))


@dataclass(frozen=True)
class FrankWolfe(PGD):
    """PGD with Frank-Wolfe steps, as in GAMA-FW (Sriramanan et al. 2020).

    A step moves the fraction `mix` of the way to the point of the ball in the direction of
    steepest ascent. `step_size` is not used; `decay_steps` apply to `mix`.
    """

    mix: UnitInterval = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._has_momentum:
            raise BadInput("FrankWolfe takes neither momentum nor backtrack; use PGD")

    def next_iterate(self, x: Tensor, x_adv: Tensor, grad: Tensor, step: int) -> Tensor:
        mix = self.mix * self._decay(step)
        extreme = self.ball.eps * self.ball.direction(grad)
        return self.ball.project(x, x + (1 - mix) * (x_adv - x) + mix * extreme)
