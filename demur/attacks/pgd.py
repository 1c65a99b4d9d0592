"""Projected gradient ascent on any goal, in any ball (Madry et al. 2018).

    PGD(Linf(8/255), steps=100, step_size=2/255, restarts=10)                  # the paper's rule
    PGD(Linf(8/255), steps=100, step_size=2/255, objective=Evasion(RCon()), keep="success",
        criterion=AcceptedError(RCon(), TPR(0.95)))                               # an honest worst case

Without `step_size` it is a quarter of eps, as the paper's 2/255 is of 8/255.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch, verify_success
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.momentum import ahead, begun, taken
from demur.attacks.objectives import CE, AttackStart, Objective, ObjectiveState
from demur.balls import Ball
from demur.errors import BadInput
from demur.field_types import NonNegative, NonNegativeInt, Positive, PositiveInt, UnitInterval
from demur.gradient import approximate_value, exact_value, gradient, gradient_only
from demur.images import per_image
from demur.noise import Stream
from demur.spec import later

NEAR = 1e-3  # the size of the noise that TRADES starts with


@dataclass(frozen=True)
class PGD(Attack):
    """Steps uphill from a random start; `keep` says which of all iterates is returned.

    largest: every restart on every image; of the last iterates the one with the largest goal.
    criterion: only images not yet broken go on; the first iterate that breaks one is returned,
    else the one with the largest goal.
    `backtrack` undoes a step that loses, and divides the next; what loses is for `backtrack_goal`
    to say, if there is one.
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
    decay_steps: tuple[PositiveInt, ...] = field(
        default=(), metadata=later(neutral=())
    )  # of the step length
    decay_factor: UnitInterval = field(default=0.1, metadata=later(neutral=0.1))
    momentum: UnitInterval = field(default=0.0, metadata=later(neutral=0.0))  # of the directions
    backtrack: NonNegative = field(default=0.0, metadata=later(neutral=0.0))  # 0: never
    backtrack_objective: Objective | None = field(default=None, metadata=later(neutral=None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._climbs and self.keep == "success":
            raise BadInput(
                "momentum and backtrack need all images to the end; use keep=max_objective"
            )
        if self.momentum == 1:
            raise BadInput("with momentum=1 no image ever moves; use less")
        if 0 < self.backtrack <= 1:
            raise BadInput("backtrack divides the step; it must be above 1, or 0 for never")
        if self.backtrack_objective is not None and not self.backtrack:
            raise BadInput("backtrack_goal says when to go back; without backtrack it does nothing")

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """Attacked images, kept by the largest goal or by the criterion."""
        return (self._largest if self.keep == "max_objective" else self._breaking)(batch, stream)

    def _largest(self, batch: AttackBatch, stream: Stream) -> Tensor:
        best, best_value = batch.x, torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
        for restart in range(self.restarts):
            x_adv, objective_state = self._begun(batch, noise.derived(stream, restart))
            judge, known = self._judge(batch, x_adv, objective_state)
            if self._climbs:
                x_adv = self._climbed(batch, x_adv, objective_state, judge, known)
            else:
                x_adv = self._stepped(batch, x_adv, objective_state)
            if self.restarts == 1:
                return x_adv  # reference code: looks at the loss once more, to no effect
            value, _ = exact_value(batch.model, judge, x_adv, batch.y, *known)
            better = value >= best_value
            best = torch.where(per_image(better, batch.x), x_adv, best)
            best_value = torch.where(better, value, best_value)
        return best

    def _stepped(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState
    ) -> Tensor:
        """The last iterate."""
        for step in range(self.steps):
            inputs = self.objective.at_step(objective_state, step, self.steps)
            grad = gradient_only(batch.model, self.objective, x_adv, batch.y, *inputs)
            x_adv = self.moved(batch.x, x_adv, grad, step)
        return x_adv

    def _climbed(
        self,
        batch: AttackBatch,
        x_adv: Tensor,
        objective_state: ObjectiveState,
        judge: Objective,
        known: ObjectiveState,
    ) -> Tensor:
        """The last iterate, which with backtracking is the best seen."""
        # reference code: a goal of its own does not look at the start, and ties shorten the step
        strict, value = self.backtrack_objective is not None, None
        if self.backtrack and not strict:
            value, _ = approximate_value(batch.model, judge, x_adv, batch.y, *known)
        climb = begun(x_adv, self._length, value)
        for step in range(self.steps):
            inputs = self.objective.at_step(objective_state, step, self.steps)
            grad = gradient_only(batch.model, self.objective, climb.x_adv, batch.y, *inputs)
            share = self._dropped(step)
            x_next, mean = ahead(self.ball, batch.x, climb, grad, self.momentum, share)
            climb = climb._replace(mean=mean)
            if self.backtrack:
                value, _ = approximate_value(batch.model, judge, x_next, batch.y, *known)
                climb = taken(climb, x_next, value, self.backtrack, strict)
            else:
                climb = climb._replace(x_adv=x_next)
        return climb.x_adv

    @property
    def _climbs(self) -> bool:
        """Whether an image takes more with it from step to step than where it is."""
        return bool(self.momentum or self.backtrack)

    def _judge(
        self, batch: AttackBatch, x_start: Tensor, objective_state: ObjectiveState
    ) -> tuple[Objective, ObjectiveState]:
        """What tells the better of two images, with what it looks at: the goal as it ends."""
        judge = self.objective
        if self.backtrack_objective is not None:
            judge = self.backtrack_objective
            objective_state = judge.prepare(
                AttackStart(batch.model, batch.x, x_start, batch.y, batch.target)
            )
        return judge, judge.at_step(objective_state, self.steps, self.steps)

    def _breaking(self, everyone: AttackBatch, stream: Stream) -> Tensor:
        model, best = everyone.model, everyone.x.clone()
        best_value, whole = self._unattacked(everyone)
        for restart in range(self.restarts):
            alive = whole.nonzero()[:, 0]
            batch = everyone.select(alive)
            x_adv, objective_state = self._begun(batch, noise.derived(stream, restart))
            for step in range(self.steps + 1):
                if len(alive) == 0:
                    return best
                inputs = self.objective.at_step(objective_state, step, self.steps)
                if step < self.steps:
                    grad, value, out = gradient(model, self.objective, x_adv, batch.y, *inputs)
                else:
                    value, out = exact_value(model, self.objective, x_adv, batch.y, *inputs)
                broken = verify_success(
                    self.criterion, model, x_adv, batch.y, self.criterion(out, batch.y)
                )
                better = broken | (value > best_value[alive])
                best[alive[better]] = x_adv[better]
                best_value[alive[better]] = value[better]
                whole[alive[broken]] = False
                left = ~broken
                alive, x_adv, batch = alive[left], x_adv[left], batch.select(left)
                objective_state = tuple(part[left] for part in objective_state)
                if step < self.steps:
                    x_adv = self.moved(batch.x, x_adv, grad[left], step)
        return best

    def _unattacked(self, batch: AttackBatch) -> tuple[Tensor, Tensor]:
        """The goal's value on the images themselves, and which need an attack to be broken."""
        objective_state = self.objective.prepare(
            AttackStart(batch.model, batch.x, batch.x, batch.y, batch.target)
        )
        inputs = self.objective.at_step(objective_state, self.steps, self.steps)
        value, out = exact_value(batch.model, self.objective, batch.x, batch.y, *inputs)
        return value, ~self.criterion(out, batch.y)

    def _begun(self, batch: AttackBatch, stream: Stream) -> tuple[Tensor, ObjectiveState]:
        """Where a restart begins, and what the goal remembers of it."""
        x_start = self._start(batch.x, batch.index, stream)
        return x_start, self.objective.prepare(
            AttackStart(batch.model, batch.x, x_start, batch.y, batch.target)
        )

    def _start(self, x: Tensor, index: Tensor, stream: Stream) -> Tensor:
        if self.start == "clean":
            return x
        if self.start == "signs":
            return self.ball.corner(x, self.seed, index, stream)
        if self.start == "near":
            return self.ball.nearby(x, NEAR, self.seed, index, stream)
        if self.start == "mixed":
            return self.ball.mixed(x, self.seed, index, stream)
        if self.start == "coin":
            return self.ball.ray_or_none(x, self.seed, index, stream)
        return self.ball.start(x, self.seed, index, stream)

    def moved(self, x: Tensor, x_adv: Tensor, grad: Tensor, step: int) -> Tensor:
        """The next iterate."""
        return self.ball.step(x, x_adv, grad, self._length * self._dropped(step))

    @property
    def _length(self) -> float:
        """How far a step goes."""
        return self.ball.eps / 4 if self.step_size is None else self.step_size

    def _dropped(self, step: int) -> float:
        """What is left of the step length."""
        return float(self.decay_factor ** sum(step >= drop for drop in self.decay_steps))


@dataclass(frozen=True)
class FrankWolfe(PGD):
    """PGD whose step goes a share of the way to the best corner of the ball; `step_size` is not used."""

    mix: UnitInterval = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._climbs:
            raise BadInput("FrankWolfe has neither momentum nor backtrack; use PGD")

    def moved(self, x: Tensor, x_adv: Tensor, grad: Tensor, step: int) -> Tensor:
        """The next iterate."""
        share = self.mix * self._dropped(step)
        corner = self.ball.eps * self.ball.direction(grad)
        return self.ball.project(x, x + (1 - share) * (x_adv - x) + share * corner)
