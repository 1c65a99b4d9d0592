"""Projected gradient descent (Madry et al. 2018) on any objective, in any ball.

Momentum, backtracking and the starts "mixed" and "ray_or_clean" follow CCAT (Stutz et al. 2020).
`FrankWolfe` is the step of GAMA-FW. `EOTPGD` follows the mean gradient of a randomised model over
its random draws (EOT, Athalye et al. 2018). No image leaves it at a lucky success: restarts are
compared by their shares of successes in fresh passes.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from demur import noise, progress
from demur.attacks.attack import Attack, AttackBatch, Criterion, Misclassified
from demur.attacks.attack_model import exact_value
from demur.attacks.balls import Ball
from demur.attacks.driver import AscentState, Found, IterativeAttack
from demur.attacks.objectives.classification import CE, Objective, ObjectiveState, wrong_classes
from demur.attacks.objectives.rejector import SuccessProbability
from demur.errors import BadInput
from demur.images import per_image
from demur.noise import Stream
from demur.numerics import fused, use_precision
from demur.output import as_output
from demur.spec import later, renamed
from demur.spec.field_types import NonNegative, NonNegativeInt, Positive, PositiveInt, UnitInterval

TRADES_SIGMA = 1e-3  # standard deviation of the noise that TRADES starts with
MAX_STEP = 1e6  # far larger steps overflow in the projection to an L2 ball


@dataclass
class PGDState(AscentState):
    """The state of an ascent that stops at success; every tensor has one row per image."""

    grad: Tensor  # at x_adv


@dataclass(frozen=True)
class PGD(IterativeAttack[PGDState]):
    """Projected gradient descent in a ball.

    Args:
        ball: Where x_adv may lie, such as Linf(8/255).
        steps: The number of gradient queries per restart.
        step_size: The size of a step; None is eps / 4, the paper's 2/255 at eps = 8/255.
        restarts: The number of restarts.
        start: The first iterate. "random": uniform in the ball. "clean": the image. "signs": a
            random corner. "near": Gaussian noise of sigma 0.001 (TRADES). "mixed": noise, a random
            radius or the image. "ray_or_clean": a random radius or the image (CCAT).
        objective: What the attack maximises.
        keep: "max_objective" runs all restarts on all images and returns the last iterate with the
            largest objective. "success" returns the first iterate that satisfies the criterion,
            else the one with the largest objective; successes leave the batch.
        criterion: When keep="success" counts a success.
        seed: The seed of the random starts.
        decay_steps: The steps at which the step size is multiplied by `decay_factor`.
        decay_factor: See `decay_steps`.
        momentum: The weight of earlier directions in the moving average of directions.
        backtrack: Undo a step that lowers the objective and divide the step size by this number; 0
            disables it.
        backtrack_objective: Decides on backtracking in place of `objective`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from demur import PGD, Linf
        >>> layers = nn.Flatten(), nn.Linear(64, 10)
        >>> model = nn.Sequential(*layers)
        >>> x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
        >>> attack = PGD(Linf(8 / 255), steps=10)
        >>> x_adv = attack(model, x, y)
    """

    ball: Ball
    steps: PositiveInt = 10
    step_size: Positive | None = None
    restarts: PositiveInt = 1
    start: Literal["random", "clean", "signs", "near", "mixed", "ray_or_clean"] = field(
        default="random", metadata=renamed(coin="ray_or_clean")
    )
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
        if self.step_size is not None and self.step_size > MAX_STEP:
            raise BadInput(
                f"PGD.step_size must be at most {MAX_STEP:g}, since pixels lie in [0, 1], "
                f"not {self.step_size:g}"
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
        if self.keep == "success":
            start = batch.prepare(self.objective, batch.x).objective_state
            inputs = self.objective.at_step(start, self.steps, self.steps)
            value, out = exact_value(batch.model, self.objective, batch.x, batch.y, *inputs)
            clean = Found(batch.x.clone(), value, self.criterion(out, batch.y))
            return self.best_restart(batch, clean, self.restarts, stream)
        if self.restarts == 1:
            # The reference code evaluates the loss once more: one more update of batch-norm
            # statistics in train mode, and no other effect.
            return self._ascent(batch, noise.derive_seed(stream, 0))[0]
        return self._largest(batch, stream)

    # ------------------------------------------------ keep="success", by the common driver

    def begin(self, batch: AttackBatch) -> tuple[AttackBatch, PGDState]:
        x_adv = self._first_iterate(batch.x, batch.index, batch.stream)
        batch = batch.prepare(self.objective, x_adv)
        none = torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
        return batch, self._query(batch, x_adv, 0, batch.x, none)

    def step(self, batch: AttackBatch, state: PGDState, step: int) -> PGDState:
        x_adv = self.next_iterate(batch.x, state.x_adv, state.grad, step)
        return self._query(batch, x_adv, step + 1, *state.best)

    def _query(
        self, batch: AttackBatch, x_adv: Tensor, step: int, best: Tensor, best_value: Tensor
    ) -> PGDState:
        """Return the state at an iterate; no gradient is needed at the last one."""
        inputs = self.objective.at_step(batch.objective_state, step, self.steps)
        if step < self.steps:
            grad, value, out = batch.model.gradient(self.objective, x_adv, batch.y, *inputs)
        else:
            value, out = exact_value(batch.model, self.objective, x_adv, batch.y, *inputs)
            grad = x_adv
        better = value > best_value
        best = torch.where(per_image(better, x_adv), x_adv, best)
        best_value = torch.where(better, value.to(best_value), best_value)
        return PGDState(x_adv, value, self.criterion(out, batch.y), best, best_value, grad)

    # ------------------------------------------------ keep="max_objective", without leaving

    def _largest(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """Return the last iterate with the largest value over all restarts; the later of equals.

        No image leaves and the host never waits for the GPU, so a CUDA graph can capture the loop.
        """
        best, best_value = batch.x, torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
        for number in range(self.restarts):
            x_adv, ranking, inputs = self._ascent(batch, noise.derive_seed(stream, number))
            value, _ = exact_value(batch.model, ranking, x_adv, batch.y, *inputs)
            better = value >= best_value
            best = torch.where(per_image(better, batch.x), x_adv, best)
            best_value = torch.where(better, value, best_value)
        return best

    def _ascent(
        self, batch: AttackBatch, stream: Stream
    ) -> tuple[Tensor, Objective, ObjectiveState]:
        """Return the last iterate of one restart, and the objective that ranks it, with inputs."""
        x_adv = self._first_iterate(batch.x, batch.index, stream)
        batch = batch.prepare(self.objective, x_adv)
        ranking, state = self.objective, batch.objective_state
        if self.backtrack_objective is not None:
            ranking = self.backtrack_objective
            state = batch.prepare(ranking, x_adv).objective_state
        ranking_inputs = ranking.at_step(state, self.steps, self.steps)
        if self._has_momentum:
            x_adv = self._momentum_ascent(batch, x_adv, ranking, ranking_inputs)
            return x_adv, ranking, ranking_inputs
        for step in range(self.steps):
            inputs = self.objective.at_step(batch.objective_state, step, self.steps)
            grad = batch.model.gradient_only(self.objective, x_adv, batch.y, *inputs)
            x_adv = self.next_iterate(batch.x, x_adv, grad, step)
        return x_adv, ranking, ranking_inputs

    def _momentum_ascent(
        self, batch: AttackBatch, x_adv: Tensor, ranking: Objective, ranking_inputs: ObjectiveState
    ) -> Tensor:
        """Return the last iterate; with backtracking it has the largest value of `ranking`."""
        # As in the reference code, a separate backtracking objective does not evaluate the start,
        # and a tie shortens the step.
        strict, value = self.backtrack_objective is not None, None
        if self.backtrack and not strict:
            value, _ = batch.model.value(ranking, x_adv, batch.y, *ranking_inputs)
        state = initial_momentum(x_adv, self._step_size, value)
        for step in range(self.steps):
            inputs = self.objective.at_step(batch.objective_state, step, self.steps)
            grad = batch.model.gradient_only(self.objective, state.x_adv, batch.y, *inputs)
            decay = self._decay(step)
            x_next, mean = propose_step(self.ball, batch.x, state, grad, self.momentum, decay)
            state = state._replace(mean=mean)
            if self.backtrack:
                value, _ = batch.model.value(ranking, x_next, batch.y, *ranking_inputs)
                state = keep_or_undo_step(state, x_next, value, self.backtrack, strict)
            else:
                state = state._replace(x_adv=x_next)
        return state.x_adv

    @property
    def _has_momentum(self) -> bool:
        """Whether a step depends on more than the current iterate."""
        return bool(self.momentum or self.backtrack)

    def _first_iterate(self, x: Tensor, index: Tensor, stream: Stream) -> Tensor:
        ball, given = self.ball, (x, self.seed, index, stream)
        match self.start:
            case "clean":
                return x
            case "signs":
                return ball.corner_start(*given)
            case "near":
                return ball.start_near(x, TRADES_SIGMA, *given[1:])
            case "mixed":
                return ball.mixed_start(*given, near=1 / 3, far=1 / 3)
            case "ray_or_clean":
                return ball.mixed_start(*given, near=0, far=1 / 2)
        return ball.start(*given)

    def next_iterate(self, x: Tensor, x_adv: Tensor, grad: Tensor, step: int) -> Tensor:
        return self.ball.step(x, x_adv, grad, self._step_size * self._decay(step))

    @property
    def _step_size(self) -> float:
        return self.ball.eps / 4 if self.step_size is None else self.step_size

    def _decay(self, step: int) -> float:
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


# ------------------------------------------------ momentum and backtracking (Stutz et al. 2020)
# No function here synchronises host and device, so the attack can be captured in a CUDA graph.


class MomentumState(NamedTuple):
    """The state of the ascent; every tensor has one row per image."""

    x_adv: Tensor
    mean: Tensor  # exponential moving average of the directions
    length: Tensor  # size of the next step
    value: Tensor  # of the objective that decides on backtracking, at x_adv


def initial_momentum(x_adv: Tensor, length: float, value: Tensor | None) -> MomentumState:
    """Return the state before the first step; without a value the first step is always kept."""
    lengths = x_adv.new_full((len(x_adv),), length)
    value = torch.full_like(lengths, -torch.inf) if value is None else value
    return MomentumState(x_adv, torch.zeros_like(x_adv), lengths, value)


@fused
def propose_step(
    ball: Ball, x: Tensor, state: MomentumState, grad: Tensor, momentum: float, decay: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the next iterate, with the step size times `decay`, and the new mean direction."""
    mean = momentum * state.mean + (1 - momentum) * ball.direction(grad)
    length = per_image(decay * state.length, x)
    return ball.project(x, state.x_adv + length * mean), mean


@fused
def keep_or_undo_step(
    state: MomentumState, x_next: Tensor, value: Tensor, factor: float, strict: bool
) -> MomentumState:
    """Return the state after a step: keep it where the objective did not fall, else undo it.

    The step size is divided by `factor` where the objective fell; with `strict` also where it
    stayed equal.
    """
    kept = value >= state.value
    full_length = value > state.value if strict else kept
    return MomentumState(
        torch.where(per_image(kept, x_next), x_next, state.x_adv),
        state.mean,
        torch.where(full_length, state.length, state.length / factor),
        torch.where(kept, value, state.value),
    )


MOMENTUM = 0.7  # share of the earlier gradients in a step: they are draws, too
WIDTH_MEMORY = 0.7  # share of the earlier widths, since a few passes estimate them roughly


@dataclass(frozen=True)
class EOTPGD(Attack):
    """PGD with momentum on the mean objective of a randomised model.

    The step size falls from eps to zero along a cosine, so that the last iterate is an average of
    many gradients. It is what a restart returns. An image leaves only if all `passes` that judge a
    restart succeed; a single restart is not judged.
    """

    ball: Ball
    steps: PositiveInt = 40
    restarts: PositiveInt = 1
    objective: Objective | None = None  # `SuccessProbability` of the criterion
    criterion: Criterion = Misclassified()
    eot_iter: PositiveInt = 5  # passes whose gradients a step averages
    passes: PositiveInt = 50
    targeted: bool = False  # each restart aims at another wrong class, by decreasing mean logit
    seed: NonNegativeInt = 0

    @property
    def search_objective(self) -> Objective:
        return self.objective or SuccessProbability(self.criterion)

    @property
    def maximised(self) -> Objective | None:
        return self.objective  # a share of successes need not rise where no pass succeeds

    @property
    def gradient_queries(self) -> float:
        return float(self.steps * self.restarts * self.eot_iter)

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        targets, found = self._targets(batch), Found.nothing(batch)
        for number, rows in found.attempts(self.restarts):
            own = replace(batch, stream=noise.derive_seed(stream, number))
            if targets is not None:
                own = replace(own, target=targets[number % len(targets)])
            own = own.select(rows)
            with progress.part(number, self.restarts):
                x_adv = self._ascend(own)
            share = torch.zeros_like(found.value[rows])
            if self.restarts > 1:
                share = success_share(self.criterion, own, x_adv, self.passes).to(share)
            found.add(rows, Found(x_adv, share, share == 1))
        return found.x_adv

    def _targets(self, batch: AttackBatch) -> Tensor | None:
        """Return the wrong classes of each image by decreasing mean logit, shape (classes-1, N)."""
        if not self.targeted or batch.target is not None:
            return None
        with torch.no_grad():
            logits = [as_output(batch.model(batch.x)).logits for _ in range(self.eot_iter)]
        return wrong_classes(torch.stack(logits).mean(0), batch.y)

    def _ascend(self, batch: AttackBatch) -> Tensor:
        x_adv = self.ball.start(batch.x, self.seed, batch.index, batch.stream)
        objective = self.search_objective
        state = batch.prepare(objective, x_adv).objective_state
        momentum = torch.zeros_like(x_adv)
        for step in range(self.steps):
            grad, state = self._mean_gradient(batch, x_adv, state, step)
            size = grad.flatten(1).abs().mean(1).clamp_min(1e-30)
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * grad / per_image(size, grad)
            length = self.ball.eps * (1 + math.cos(math.pi * step / self.steps)) / 2
            x_adv = self.ball.project(batch.x, x_adv + length * self.ball.direction(momentum))
            progress.report(step + 1, self.steps)
        return x_adv

    def _mean_gradient(
        self, batch: AttackBatch, x_adv: Tensor, state: ObjectiveState, step: int
    ) -> tuple[Tensor, ObjectiveState]:
        """Return the mean gradient of fresh passes, and the objective's state with new widths."""
        objective, grad, margins = self.search_objective, torch.zeros_like(x_adv), []
        inputs = objective.at_step(state, step, self.steps)
        for _ in range(self.eot_iter):
            query = batch.model.gradient(objective, x_adv, batch.y, *inputs)
            grad += query.grad / self.eot_iter
            if isinstance(objective, SuccessProbability):
                margins.append(objective.margins(query.out, batch.y, state[0]))
        if isinstance(objective, SuccessProbability):
            new = objective.widths(torch.stack(margins))
            state = state[0], WIDTH_MEMORY * state[1] + (1 - WIDTH_MEMORY) * new
        return grad, state


def success_share(criterion: Criterion, batch: AttackBatch, x: Tensor, passes: int) -> Tensor:
    """Return the share of exact forward passes in which the criterion holds, N, float."""
    with torch.no_grad(), use_precision("fp32", x.device):
        found = [criterion(as_output(batch.model(x)), batch.y) for _ in range(passes)]
    return torch.stack(found).float().mean(0)
