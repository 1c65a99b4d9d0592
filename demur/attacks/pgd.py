"""Projected gradient ascent on any goal, in any ball (Madry et al. 2018).

    PGD(Linf(8/255), steps=100, step=2/255, restarts=10)                  # the paper's rule
    PGD(Linf(8/255), steps=100, step=2/255, goal=Evade(RCon()), keep="criterion",
        criterion=Slips(RCon(), TPR(0.95)))                               # an honest worst case

Without `step` it is a quarter of eps, as the paper's 2/255 is of 8/255.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.criteria import Criterion, Wrong
from demur.attacks.goals import CE, Goal
from demur.balls import Ball
from demur.declared import Count, Natural, Positive
from demur.gradient import Model, gradient, slope, value_at
from demur.noise import Stream
from demur.output import output_of


@dataclass(frozen=True)
class PGD(Attack):
    """Steps uphill from a random start; `keep` says which of all iterates is returned.

    largest: every restart on every image; of the last iterates the one with the largest goal.
    criterion: only images not yet broken go on; the first iterate that breaks one is returned,
    else the one with the largest goal.
    """

    ball: Ball
    steps: Count = 10
    step: Positive | None = None
    restarts: Count = 1
    start: Literal["random", "clean"] = "random"
    goal: Goal = CE()
    keep: Literal["largest", "criterion"] = "largest"
    criterion: Criterion = Wrong()
    seed: Natural = 0

    def perturbed(
        self, model: Model, x: Tensor, y: Tensor, index: Tensor, stream: Stream = 0
    ) -> Tensor:
        """Attacked images, kept by the largest goal or by the criterion."""
        if self.keep == "largest":
            return self._largest(model, x, y, index, stream)
        return self._breaking(model, x, y, index, stream)

    def _largest(self, model: Model, x: Tensor, y: Tensor, index: Tensor, stream: Stream) -> Tensor:
        best, best_value = x, torch.full(y.shape, -torch.inf, device=x.device, dtype=x.dtype)
        for restart in range(self.restarts):
            x_adv = self._start(x, index, noise.derived(stream, restart))
            for _ in range(self.steps):
                x_adv = self._ascended(x, x_adv, slope(model, self.goal, x_adv, y))
            if self.restarts == 1:
                return x_adv  # reference code: looks at the loss once more, to no effect
            value, _ = value_at(model, self.goal, x_adv, y)
            better = value >= best_value
            best = torch.where(_per_image(better, x), x_adv, best)
            best_value = torch.where(better, value, best_value)
        return best

    def _breaking(
        self, model: Model, x: Tensor, y: Tensor, index: Tensor, stream: Stream
    ) -> Tensor:
        best = x.clone()
        best_value, out = value_at(model, self.goal, x, y)
        whole = ~self.criterion(out, y)  # an image that is broken as it stands needs no attack
        for restart in range(self.restarts):
            alive = whole.nonzero()[:, 0]
            x_adv = self._start(x[alive], index[alive], noise.derived(stream, restart))
            for step in range(self.steps + 1):
                if len(alive) == 0:
                    return best
                if step < self.steps:
                    grad, value, out = gradient(model, self.goal, x_adv, y[alive])
                else:
                    value, out = value_at(model, self.goal, x_adv, y[alive])
                broken = self._confirmed(model, x_adv, y[alive], self.criterion(out, y[alive]))
                better = broken | (value > best_value[alive])
                best[alive[better]] = x_adv[better]
                best_value[alive[better]] = value[better]
                whole[alive[broken]] = False
                alive, x_adv = alive[~broken], x_adv[~broken]
                if step < self.steps:
                    x_adv = self._ascended(x[alive], x_adv, grad[~broken])
        return best

    def _confirmed(self, model: Model, x_adv: Tensor, y: Tensor, broken: Tensor) -> Tensor:
        """What is broken; a gradient in rough arithmetic is not taken at its word."""
        if getattr(model, "exact", True) or not broken.any():
            return broken
        claimed = broken.nonzero()[:, 0]
        with torch.no_grad():
            found = self.criterion(output_of(model(x_adv[claimed])), y[claimed])
        return broken.index_put((claimed,), found)

    def _start(self, x: Tensor, index: Tensor, stream: Stream) -> Tensor:
        if self.start == "clean":
            return x
        return self.ball.start(x, self.seed, index, stream)

    def _ascended(self, x: Tensor, x_adv: Tensor, grad: Tensor) -> Tensor:
        length = self.ball.eps / 4 if self.step is None else self.step
        return self.ball.step(x, x_adv, grad, length)


def _per_image(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *([1] * (x.ndim - 1)))
