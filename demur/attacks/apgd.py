"""Auto-PGD: ascent with momentum whose step halves by itself (Croce and Hein 2020).

    APGD(Linf(8/255), goal=DLR())           # no step length to choose

At checkpoints that come closer and closer, an image whose goal rose too seldom, or whose best did
not move, goes back to its best place with half the step.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from demur.attacks.attack import Attack
from demur.attacks.criteria import Criterion, Wrong
from demur.attacks.goals import CE, Goal, Kept, Moment
from demur.attacks.restarts import best_of
from demur.attacks.victims import Claims, Rows, Victims, block_for, confirmed
from demur.balls import Ball
from demur.batch import per_image
from demur.declared import Count, Natural, Share
from demur.gradient import Gradient, glance, gradient
from demur.noise import Stream

FIRST, SHRINK, LEAST = 0.22, 0.03, 0.06  # of all steps: the first gap between checks, and so on


@dataclass
class Climb(Rows):
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
    steps: Count = 100
    restarts: Count = 1
    goal: Goal = CE()
    keep: Literal["largest", "criterion"] = "criterion"
    criterion: Criterion = Wrong()
    rho: Share = 0.75  # rises below this share of the steps since the last check are too few
    looks: Count = 1  # gradients averaged, for nets that answer at random
    seed: Natural = 0

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """Attacked images: broken where that was found, else those with the largest goal."""
        return best_of(on, self._whole(on), self.restarts, stream, self._climbed)

    def _whole(self, on: Victims) -> Tensor:
        """Which images need an attack: all, or those not broken as they stand."""
        if self.keep == "largest":
            return torch.ones_like(on.y, dtype=torch.bool)
        _, out = glance(on.model, CE(), on.x, on.y)
        return ~confirmed(self.criterion, on.model, on.x, on.y, self.criterion(out, on.y))

    def _climbed(self, on: Victims, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """One restart: the images to keep, the goal's best value, and which are broken."""
        x_start = self.ball.scaled_start(on.x, self.seed, on.index, stream)
        kept = self.goal.begin(Moment(on.model, on.x, x_start, on.y, on.target))
        found, values = on.x.clone(), torch.full_like(on.y, -torch.inf, dtype=on.x.dtype)
        done = torch.zeros_like(on.y, dtype=torch.bool)
        alive = torch.arange(len(on.x), device=on.x.device)
        climb, broken = self._first(on, x_start, kept)
        checks, block, claims = _checks(self.steps), block_for(on.model), Claims.none(on.x)
        since = 0
        for step in range(self.steps + 1):
            claims = claims.or_surer(climb.x_adv, climb.value, broken)
            if step % block == 0 or step == self.steps:
                true = claims.true(self.criterion, on)
                if len(gone := true.nonzero()[:, 0]):  # rows: every mask would make a device wait
                    place = alive[gone]
                    found[place], values[place] = claims.x_adv[gone], claims.value[gone]
                    done[place] = True
                    left = (~true).nonzero()[:, 0]
                    alive, climb, on = alive[left], climb.at(left), on.at(left)
                    kept = tuple(part[left] for part in kept)
                claims = Claims.none(on.x)
            if step == self.steps or len(alive) == 0:
                break
            climb, broken = self._stepped(climb, on, kept, step)
            since += 1
            if step + 1 in checks:
                climb = self._checked(climb, since)
                since = 0
        found[alive], values[alive] = climb.best, climb.best_value
        return found, values, done

    def _first(self, on: Victims, x_adv: Tensor, kept: Kept) -> tuple[Climb, Tensor]:
        """Everything at the start, and what seems broken there."""
        (grad, value, _), broken = self._look(on, x_adv, kept, 0)
        length = torch.full_like(value, 2 * self.ball.eps)
        none = torch.zeros_like(value)
        climb = Climb(
            x_adv, x_adv, grad, value, x_adv, grad, value, length, none, value,
            torch.ones_like(on.y, dtype=torch.bool),
        )  # fmt: skip
        return climb, broken

    def _stepped(self, c: Climb, on: Victims, kept: Kept, step: int) -> tuple[Climb, Tensor]:
        """One step with momentum, and what seems broken after it."""
        inertia = 0.25 if step else 0.0
        ahead = c.x_adv + per_image(c.length, c.x_adv) * self.ball.direction(c.grad)
        ahead = self.ball.project(on.x, ahead)
        drift = c.x_adv - c.before
        x_adv = c.x_adv + (1 - inertia) * (ahead - c.x_adv) + inertia * drift
        x_adv = self.ball.project(on.x, x_adv)
        (grad, value, _), broken = self._look(on, x_adv, kept, step + 1)
        better = value > c.best_value
        wide = per_image(better, x_adv)
        return replace(
            c, x_adv=x_adv, before=c.x_adv, grad=grad, value=value,
            best=torch.where(wide, x_adv, c.best), best_grad=torch.where(wide, grad, c.best_grad),
            best_value=torch.where(better, value, c.best_value),
            rises=c.rises + (value > c.value).to(value.dtype),
        ), broken  # fmt: skip

    def _checked(self, c: Climb, since: int) -> Climb:
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

    def _look(self, on: Victims, x_adv: Tensor, kept: Kept, step: int) -> tuple[Gradient, Tensor]:
        """The mean gradient of some looks, and what seems broken at the last of them."""
        given = self.goal.given(kept, step, self.steps)
        seen = [gradient(on.model, self.goal, x_adv, on.y, *given) for _ in range(self.looks)]
        grad = torch.stack([look.grad for look in seen]).mean(0) if self.looks > 1 else seen[0].grad
        last = Gradient(grad, seen[-1].value, seen[-1].out)
        if self.keep == "largest":
            return last, torch.zeros_like(on.y, dtype=torch.bool)
        return last, self.criterion(last.out, on.y)


def _checks(steps: int) -> set[int]:
    """After how many steps there is a check."""
    gap, shrink, least = (max(1, int(share * steps)) for share in (FIRST, SHRINK, LEAST))
    found, at = set(), gap
    while at <= steps:
        found.add(at)
        gap = max(gap - shrink, least)
        at += gap
    return found
