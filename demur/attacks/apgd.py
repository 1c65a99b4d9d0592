"""Auto-PGD: ascent with momentum whose step halves by itself (Croce and Hein 2020).

    APGD(Linf(8/255), objective=DLR())           # no step length to choose

At checkpoints that come closer and closer, an image whose goal rose too seldom, or whose best did
not move, goes back to its best place with half the step.
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

FIRST, SHRINK, LEAST = 0.22, 0.03, 0.06  # of all steps: the first gap between checks, and so on


@dataclass
class APGDState(PerImageState):
    """Images on their way up; every tensor has one row per image."""

    x_adv: Tensor
    before: Tensor  # the iterate before
    grad: Tensor
    value: Tensor
    best: Tensor
    best_grad: Tensor
    best_value: Tensor
    length: Tensor  # of the step
    rises: Tensor  # since the last check
    best_at_check: Tensor
    reduced: Tensor  # at the last check


@dataclass(frozen=True)
class APGD(Attack):
    """Auto-PGD; `keep` as in PGD, the largest goal being that of the best iterate."""

    ball: Ball
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    objective: Objective = CE()
    keep: Literal["max_objective", "success"] = "success"
    criterion: Criterion = Misclassified()
    rho: UnitInterval = 0.75  # rises below this share of the steps since the last check are too few
    eot_iter: PositiveInt = 1  # gradients averaged, for nets that answer at random
    seed: NonNegativeInt = 0

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """Attacked images: broken where that was found, else those with the largest goal."""
        return best_of_restarts(batch, self._whole(batch), self.restarts, stream, self._climbed)

    def _whole(self, batch: AttackBatch) -> Tensor:
        """Which images need an attack: all, or those not broken as they stand."""
        if self.keep == "max_objective":
            return torch.ones_like(batch.y, dtype=torch.bool)
        _, out = approximate_value(batch.model, CE(), batch.x, batch.y)
        return ~verify_success(
            self.criterion, batch.model, batch.x, batch.y, self.criterion(out, batch.y)
        )

    def _climbed(self, batch: AttackBatch, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """One restart: the images to keep, the goal's best value, and which are broken."""
        x_start = self.ball.scaled_start(batch.x, self.seed, batch.index, stream)
        objective_state = self.objective.prepare(
            AttackStart(batch.model, batch.x, x_start, batch.y, batch.target)
        )
        found, values = batch.x.clone(), torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
        done = torch.zeros_like(batch.y, dtype=torch.bool)
        alive = torch.arange(len(batch.x), device=batch.x.device)
        climb, broken = self._first(batch, x_start, objective_state)
        checks, block, claims = (
            _checks(self.steps),
            verification_interval(batch.model),
            Candidates.none(batch.x),
        )
        since = 0
        for step in range(self.steps + 1):
            claims = claims.update(climb.x_adv, climb.value, broken)
            if step % block == 0 or step == self.steps:
                true = claims.true(self.criterion, batch)
                if len(gone := true.nonzero()[:, 0]):  # rows: every mask would make a device wait
                    place = alive[gone]
                    found[place], values[place] = claims.x_adv[gone], claims.value[gone]
                    done[place] = True
                    left = (~true).nonzero()[:, 0]
                    alive, climb, batch = alive[left], climb.select(left), batch.select(left)
                    objective_state = tuple(part[left] for part in objective_state)
                claims = Candidates.none(batch.x)
            if step == self.steps or len(alive) == 0:
                break
            climb, broken = self._stepped(climb, batch, objective_state, step)
            since += 1
            if step + 1 in checks:
                climb = self._checked(climb, since)
                since = 0
        found[alive], values[alive] = climb.best, climb.best_value
        return found, values, done

    def _first(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState
    ) -> tuple[APGDState, Tensor]:
        """Everything at the start, and what seems broken there."""
        (grad, value, _), broken = self._look(batch, x_adv, objective_state, 0)
        length = torch.full_like(value, 2 * self.ball.eps)
        none = torch.zeros_like(value)
        climb = APGDState(
            x_adv, x_adv, grad, value, x_adv, grad, value, length, none, value,
            torch.ones_like(batch.y, dtype=torch.bool),
        )  # fmt: skip
        return climb, broken

    def _stepped(
        self, c: APGDState, batch: AttackBatch, objective_state: ObjectiveState, step: int
    ) -> tuple[APGDState, Tensor]:
        """One step with momentum, and what seems broken after it."""
        inertia = 0.25 if step else 0.0
        ahead = c.x_adv + per_image(c.length, c.x_adv) * self.ball.direction(c.grad)
        ahead = self.ball.project(batch.x, ahead)
        drift = c.x_adv - c.before
        x_adv = c.x_adv + (1 - inertia) * (ahead - c.x_adv) + inertia * drift
        x_adv = self.ball.project(batch.x, x_adv)
        (grad, value, _), broken = self._look(batch, x_adv, objective_state, step + 1)
        better = value > c.best_value
        wide = per_image(better, x_adv)
        return replace(
            c, x_adv=x_adv, before=c.x_adv, grad=grad, value=value,
            best=torch.where(wide, x_adv, c.best), best_grad=torch.where(wide, grad, c.best_grad),
            best_value=torch.where(better, value, c.best_value),
            rises=c.rises + (value > c.value).to(value.dtype),
        ), broken  # fmt: skip

    def _checked(self, c: APGDState, since: int) -> APGDState:
        """Half the step, from the best place, for whoever rose too seldom or got stuck."""
        stuck = ~c.reduced & (c.best_at_check >= c.best_value)
        back = (c.rises <= self.rho * since) | stuck
        wide = per_image(back, c.x_adv)
        return replace(  # the last value stays: the next rise is counted from it
            c, x_adv=torch.where(wide, c.best, c.x_adv),
            grad=torch.where(wide, c.best_grad, c.grad),
            length=torch.where(back, c.length / 2, c.length), rises=torch.zeros_like(c.rises),
            best_at_check=c.best_value, reduced=back,
        )  # fmt: skip

    def _look(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState, step: int
    ) -> tuple[Gradient, Tensor]:
        """The mean gradient of some looks, and what seems broken at the last of them."""
        inputs = self.objective.at_step(objective_state, step, self.steps)
        seen = [
            gradient(batch.model, self.objective, x_adv, batch.y, *inputs)
            for _ in range(self.eot_iter)
        ]
        grad = (
            torch.stack([look.grad for look in seen]).mean(0) if self.eot_iter > 1 else seen[0].grad
        )
        last = Gradient(grad, seen[-1].value, seen[-1].out)
        if self.keep == "max_objective":
            return last, torch.zeros_like(batch.y, dtype=torch.bool)
        return last, self.criterion(last.out, batch.y)


def _checks(steps: int) -> set[int]:
    """After how many steps there is a check."""
    gap, shrink, least = (max(1, int(share * steps)) for share in (FIRST, SHRINK, LEAST))
    found, at = set(), gap
    while at <= steps:
        found.add(at)
        gap = max(gap - shrink, least)
        at += gap
    return found
