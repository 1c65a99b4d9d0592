"""Projected gradient ascent on any goal, in any ball (Madry et al. 2018).

    PGD(Linf(8/255), steps=100, step=2/255, restarts=10)                  # the paper's rule
    PGD(Linf(8/255), steps=100, step=2/255, goal=Evade(RCon()), keep="criterion",
        criterion=Slips(RCon(), TPR(0.95)))                               # an honest worst case

Without `step` it is a quarter of eps, as the paper's 2/255 is of 8/255.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.criteria import Criterion, Wrong
from demur.attacks.goals import CE, Goal, Kept, Moment
from demur.attacks.momentum import ahead, begun, taken
from demur.attacks.victims import Victims, confirmed
from demur.balls import Ball
from demur.batch import per_image
from demur.declared import Count, Natural, NonNegative, Positive, Share
from demur.errors import BadInput
from demur.gradient import glance, gradient, slope, value_at
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
    steps: Count = 10
    step: Positive | None = None
    restarts: Count = 1
    start: Literal["random", "clean", "signs", "near", "mixed", "coin"] = "random"
    goal: Goal = CE()
    keep: Literal["largest", "criterion"] = "largest"
    criterion: Criterion = Wrong()
    seed: Natural = 0
    drops: tuple[Count, ...] = field(default=(), metadata=later(neutral=()))  # of the step length
    factor: Share = field(default=0.1, metadata=later(neutral=0.1))
    momentum: Share = field(default=0.0, metadata=later(neutral=0.0))  # of the directions
    backtrack: NonNegative = field(default=0.0, metadata=later(neutral=0.0))  # 0: never
    backtrack_goal: Goal | None = field(default=None, metadata=later(neutral=None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._climbs and self.keep == "criterion":
            raise BadInput("momentum and backtrack need all images to the end; use keep=largest")
        if self.momentum == 1:
            raise BadInput("with momentum=1 no image ever moves; use less")
        if 0 < self.backtrack <= 1:
            raise BadInput("backtrack divides the step; it must be above 1, or 0 for never")
        if self.backtrack_goal is not None and not self.backtrack:
            raise BadInput("backtrack_goal says when to go back; without backtrack it does nothing")

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """Attacked images, kept by the largest goal or by the criterion."""
        return (self._largest if self.keep == "largest" else self._breaking)(on, stream)

    def _largest(self, on: Victims, stream: Stream) -> Tensor:
        best, best_value = on.x, torch.full_like(on.y, -torch.inf, dtype=on.x.dtype)
        for restart in range(self.restarts):
            x_adv, kept = self._begun(on, noise.derived(stream, restart))
            judge, known = self._judge(on, x_adv, kept)
            if self._climbs:
                x_adv = self._climbed(on, x_adv, kept, judge, known)
            else:
                x_adv = self._stepped(on, x_adv, kept)
            if self.restarts == 1:
                return x_adv  # reference code: looks at the loss once more, to no effect
            value, _ = value_at(on.model, judge, x_adv, on.y, *known)
            better = value >= best_value
            best = torch.where(per_image(better, on.x), x_adv, best)
            best_value = torch.where(better, value, best_value)
        return best

    def _stepped(self, on: Victims, x_adv: Tensor, kept: Kept) -> Tensor:
        """The last iterate."""
        for step in range(self.steps):
            given = self.goal.given(kept, step, self.steps)
            grad = slope(on.model, self.goal, x_adv, on.y, *given)
            x_adv = self.moved(on.x, x_adv, grad, step)
        return x_adv

    def _climbed(self, on: Victims, x_adv: Tensor, kept: Kept, judge: Goal, known: Kept) -> Tensor:
        """The last iterate, which with backtracking is the best seen."""
        # reference code: a goal of its own does not look at the start, and ties shorten the step
        strict, value = self.backtrack_goal is not None, None
        if self.backtrack and not strict:
            value, _ = glance(on.model, judge, x_adv, on.y, *known)
        climb = begun(x_adv, self._length, value)
        for step in range(self.steps):
            given = self.goal.given(kept, step, self.steps)
            grad = slope(on.model, self.goal, climb.x_adv, on.y, *given)
            share = self._dropped(step)
            x_next, mean = ahead(self.ball, on.x, climb, grad, self.momentum, share)
            climb = climb._replace(mean=mean)
            if self.backtrack:
                value, _ = glance(on.model, judge, x_next, on.y, *known)
                climb = taken(climb, x_next, value, self.backtrack, strict)
            else:
                climb = climb._replace(x_adv=x_next)
        return climb.x_adv

    @property
    def _climbs(self) -> bool:
        """Whether an image takes more with it from step to step than where it is."""
        return bool(self.momentum or self.backtrack)

    def _judge(self, on: Victims, x_start: Tensor, kept: Kept) -> tuple[Goal, Kept]:
        """What tells the better of two images, with what it looks at: the goal as it ends."""
        judge = self.goal
        if self.backtrack_goal is not None:
            judge = self.backtrack_goal
            kept = judge.begin(Moment(on.model, on.x, x_start, on.y, on.target))
        return judge, judge.given(kept, self.steps, self.steps)

    def _breaking(self, everyone: Victims, stream: Stream) -> Tensor:
        model, best = everyone.model, everyone.x.clone()
        best_value, whole = self._unattacked(everyone)
        for restart in range(self.restarts):
            alive = whole.nonzero()[:, 0]
            on = everyone.at(alive)
            x_adv, kept = self._begun(on, noise.derived(stream, restart))
            for step in range(self.steps + 1):
                if len(alive) == 0:
                    return best
                given = self.goal.given(kept, step, self.steps)
                if step < self.steps:
                    grad, value, out = gradient(model, self.goal, x_adv, on.y, *given)
                else:
                    value, out = value_at(model, self.goal, x_adv, on.y, *given)
                broken = confirmed(self.criterion, model, x_adv, on.y, self.criterion(out, on.y))
                better = broken | (value > best_value[alive])
                best[alive[better]] = x_adv[better]
                best_value[alive[better]] = value[better]
                whole[alive[broken]] = False
                left = ~broken
                alive, x_adv, on = alive[left], x_adv[left], on.at(left)
                kept = tuple(part[left] for part in kept)
                if step < self.steps:
                    x_adv = self.moved(on.x, x_adv, grad[left], step)
        return best

    def _unattacked(self, on: Victims) -> tuple[Tensor, Tensor]:
        """The goal's value on the images themselves, and which need an attack to be broken."""
        kept = self.goal.begin(Moment(on.model, on.x, on.x, on.y, on.target))
        given = self.goal.given(kept, self.steps, self.steps)
        value, out = value_at(on.model, self.goal, on.x, on.y, *given)
        return value, ~self.criterion(out, on.y)

    def _begun(self, on: Victims, stream: Stream) -> tuple[Tensor, Kept]:
        """Where a restart begins, and what the goal remembers of it."""
        x_start = self._start(on.x, on.index, stream)
        return x_start, self.goal.begin(Moment(on.model, on.x, x_start, on.y, on.target))

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
        return self.ball.eps / 4 if self.step is None else self.step

    def _dropped(self, step: int) -> float:
        """What is left of the step length."""
        return float(self.factor ** sum(step >= drop for drop in self.drops))


@dataclass(frozen=True)
class FrankWolfe(PGD):
    """PGD whose step goes a share of the way to the best corner of the ball; `step` is not used."""

    mix: Share = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._climbs:
            raise BadInput("FrankWolfe has neither momentum nor backtrack; use PGD")

    def moved(self, x: Tensor, x_adv: Tensor, grad: Tensor, step: int) -> Tensor:
        """The next iterate."""
        share = self.mix * self._dropped(step)
        corner = self.ball.eps * self.ball.direction(grad)
        return self.ball.project(x, x + (1 - share) * (x_adv - x) + share * corner)
