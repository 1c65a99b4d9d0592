"""A search for the image whose least margin is the highest: linear games, one after the other.

    MaxMinMargin(Linf(8/255), AcceptedError(RCon(), TPR(0.95)))

To be wrong and to be accepted pull in different directions. Were the margins linear, the best
compromise within the ball would be the outcome of a small game between the image and the weights
of its margins. Each step plays that game on the margins as they look from the best image so far,
and goes a share of the way to its outcome: a larger share after a success, half after a failure.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch, PerImageState, verify_success
from demur.attacks.criteria import AcceptedError
from demur.attacks.margins import Margins, margins_at
from demur.attacks.objectives import CE, AttackStart, MinMargin
from demur.attacks.restarts import best_of_restarts
from demur.balls import Ball
from demur.field_types import NonNegativeInt, PositiveInt
from demur.gradient import exact_value
from demur.images import per_image
from demur.noise import Stream

ROUNDS = 20  # of a game
BOLDER, SHYER = 1.5, 0.5  # what becomes of the share of the way


@dataclass
class MaxMinState(PerImageState):
    """Images on their way; every tensor has one row per image."""

    place: Tensor  # in the batch
    x_adv: Tensor
    best: Tensor
    value: Tensor  # the least margin of the best
    values: Tensor  # its margins and their gradients
    grads: Tensor
    share: Tensor
    weights: Tensor  # of the margins, as the games so far have left them
    games: Tensor  # played so far

    def updated(self, margins: Margins) -> Self:
        """The search after a look at `x_adv`."""
        value = margins.values.amin(1)
        rose = value > self.value
        wide = per_image(rose, self.x_adv)
        return type(self)(
            self.place, self.x_adv, torch.where(wide, self.x_adv, self.best),
            torch.where(rose, value, self.value),
            torch.where(rose[:, None], margins.values, self.values),
            torch.where(rose[:, None, None], margins.grads, self.grads),
            torch.where(rose, (BOLDER * self.share).clamp(max=1), SHYER * self.share),
            self.weights, self.games,
        )  # fmt: skip

    def moved(self, ball: Ball, x: Tensor) -> Self:
        """The search on its way to the outcome of another game."""
        target, weights = played(ball, x, self)
        x_adv = self.best + per_image(self.share, x) * (target - self.best)
        x_adv = ball.project(x, x_adv)  # out of it by a rounding only
        return replace(self, x_adv=x_adv, weights=weights, games=self.games + 1)


@dataclass(frozen=True)
class MaxMinMargin(Attack):
    """Successive linear games about the margins of being wrong and accepted."""

    ball: Ball
    rule: AcceptedError
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    seed: NonNegativeInt = 0

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """Broken images where they were found, else those with the highest least margin."""
        _, out = exact_value(batch.model, CE(), batch.x, batch.y)
        return best_of_restarts(
            batch, ~self.rule(out, batch.y), self.restarts, stream, self._searched
        )

    def _searched(self, batch: AttackBatch, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """One restart: the images to keep, their least margins, and which are broken."""
        x_adv = self.ball.scaled_start(batch.x, self.seed, batch.index, stream)
        least = MinMargin(self.rule)
        objective_state = least.prepare(
            AttackStart(batch.model, batch.x, x_adv, batch.y, batch.target)
        )
        search = begun(x_adv, objective_state[1].shape[1])
        found, values = batch.x.clone(), torch.full_like(search.value, -torch.inf)
        done = torch.zeros_like(batch.y, dtype=torch.bool)
        for _ in range(self.steps):
            margins, out = margins_at(batch, least, search.x_adv, objective_state)
            broken = verify_success(
                self.rule, batch.model, search.x_adv, batch.y, self.rule(out, batch.y)
            )
            if broken.any():
                gone = search.place[broken]
                found[gone], done[gone] = search.x_adv[broken], True
                left = ~broken
                search, margins, batch = (
                    search.select(left),
                    margins.select(left),
                    batch.select(left),
                )
                objective_state = tuple(part[left] for part in objective_state)
            if len(search.place) == 0:
                break
            search = search.updated(margins).moved(self.ball, batch.x)
        found[search.place], values[search.place] = search.best, search.value
        return found, values, done


def played(ball: Ball, x: Tensor, search: MaxMinState) -> tuple[Tensor, Tensor]:
    """The image of the ball with about the highest least margin, were they linear from the best.

    Both players answer the other's average so far: the image takes the end of the ball that the
    weighted gradient points to, the weights take the margin that is the lowest. A later game goes
    on where the one before it ended, and is the finer for it.
    """
    weights, average = search.weights, search.best
    for turn in range(ROUNDS):
        share = 2 / (turn + 2 + ROUNDS * search.games)  # N
        mean = (weights[:, :, None] * search.grads).sum(1).view_as(x)
        end = ball.project(x, x + ball.eps * ball.direction(mean))
        average = average + per_image(share, x) * (end - average)
        step = (average - search.best).flatten(1)
        ahead = search.values + (search.grads * step[:, None]).sum(2)
        lowest = one_hot(ahead.argmin(1), weights.shape[1]).to(weights)
        weights = weights + share[:, None] * (lowest - weights)
    return average, weights


def begun(x_adv: Tensor, count: int) -> MaxMinState:
    """A search that has seen nothing yet."""
    number, pixels = len(x_adv), x_adv[0].numel()
    lowest = x_adv.new_full((number,), -torch.inf)
    return MaxMinState(
        torch.arange(number, device=x_adv.device), x_adv, x_adv, lowest,
        x_adv.new_zeros(number, count), x_adv.new_zeros(number, count, pixels),
        x_adv.new_ones(number), x_adv.new_full((number, count), 1 / count),
        x_adv.new_zeros(number),
    )  # fmt: skip
