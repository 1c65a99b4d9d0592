"""Maximise the smallest margin of an accepted error by a sequence of linearised games (ours).

    MaxMinMargin(Linf(8/255), AcceptedError(RCon(), TPR(0.95)))

The margins "wrong" and "accepted" have conflicting gradients. With linearised margins, max-min over
the ball is a zero-sum game between the image and the weights of the margins. Each step solves it
by fictitious play around the best iterate and moves part of the way to the solution.
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

ROUNDS = 20  # of fictitious play per step
GROW, SHRINK = 1.5, 0.5  # factors of the step fraction after a rise and after a fall


@dataclass
class MaxMinState(PerImageState):
    """The state of the search; every tensor has one row per image."""

    row: Tensor  # in the batch
    x_adv: Tensor
    best: Tensor  # iterate with the largest smallest margin
    value: Tensor  # smallest margin at `best`
    values: Tensor  # all margins at `best`, N, M
    grads: Tensor  # their gradients, N, M, D
    step_fraction: Tensor  # of the way to the solution of the game
    weights: Tensor  # of the margins, carried over from game to game, N, M
    games: Tensor  # number of games so far

    def update_best(self, margins: Margins) -> Self:
        """Return the state with the margins at `x_adv` taken into account."""
        value = margins.values.amin(1)
        rose = value > self.value
        mask = per_image(rose, self.x_adv)
        fraction = self.step_fraction
        return replace(
            self, best=torch.where(mask, self.x_adv, self.best),
            value=torch.where(rose, value, self.value),
            values=torch.where(rose[:, None], margins.values, self.values),
            grads=torch.where(rose[:, None, None], margins.grads, self.grads),
            step_fraction=torch.where(rose, (GROW * fraction).clamp(max=1), SHRINK * fraction),
        )  # fmt: skip

    def step(self, ball: Ball, x: Tensor) -> Self:
        """Return the state after a step towards the solution of the linearised game."""
        solution, weights = solve_game(ball, x, self)
        x_adv = self.best + per_image(self.step_fraction, x) * (solution - self.best)
        x_adv = ball.project(x, x_adv)  # corrects rounding only
        return replace(self, x_adv=x_adv, weights=weights, games=self.games + 1)


@dataclass(frozen=True)
class MaxMinMargin(Attack):
    """Maximise the smallest of the margins "wrong" and "accepted by each score".

    Args:
        ball: Linf or L2.
        criterion: The success criterion; it defines the margins.
        steps: The number of steps per restart, each with one gradient query per margin.
        restarts: The number of restarts.
        seed: The seed of the random starts.
    """

    ball: Ball
    criterion: AcceptedError
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    seed: NonNegativeInt = 0

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        _, out = exact_value(batch.model, CE(), batch.x, batch.y)
        to_attack = ~self.criterion(out, batch.y)
        return best_of_restarts(batch, to_attack, self.restarts, stream, self._restart)

    def _restart(self, batch: AttackBatch, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Run one restart; return examples, their smallest margins and verified success."""
        x_adv = self.ball.scaled_start(batch.x, self.seed, batch.index, stream)
        min_margin = MinMargin(self.criterion)
        objective_state = min_margin.prepare(
            AttackStart(batch.model, batch.x, x_adv, batch.y, batch.target)
        )
        state = initial_state(x_adv, objective_state[1].shape[1])
        best, values = batch.x.clone(), torch.full_like(state.value, -torch.inf)
        success = torch.zeros_like(batch.y, dtype=torch.bool)
        for _ in range(self.steps):
            margins, out = margins_at(batch, min_margin, state.x_adv, objective_state)
            verified = verify_success(
                self.criterion, batch.model, state.x_adv, batch.y, self.criterion(out, batch.y)
            )
            if verified.any():
                done = state.row[verified]
                best[done], success[done] = state.x_adv[verified], True
                left = ~verified
                state, margins = state.select(left), margins.select(left)
                batch = batch.select(left)
                objective_state = tuple(part[left] for part in objective_state)
            if len(state.row) == 0:
                break
            state = state.update_best(margins).step(self.ball, batch.x)
        best[state.row], values[state.row] = state.best, state.value
        return best, values, success


def solve_game(ball: Ball, x: Tensor, state: MaxMinState) -> tuple[Tensor, Tensor]:
    """Return an approximate max-min solution of the linearised margins, and the margin weights.

    Fictitious play: each player responds to the other's average so far. The image moves to the
    point of the ball that maximises the weighted margin; the weights move to the smallest margin.
    Later games continue from the weights of earlier ones with smaller steps.
    """
    weights, average = state.weights, state.best
    for turn in range(ROUNDS):
        rate = 2 / (turn + 2 + ROUNDS * state.games)  # N
        weighted_grad = (weights[:, :, None] * state.grads).sum(1).view_as(x)
        response = ball.project(x, x + ball.eps * ball.direction(weighted_grad))
        average = average + per_image(rate, x) * (response - average)
        delta = (average - state.best).flatten(1)
        predicted = state.values + (state.grads * delta[:, None]).sum(2)
        smallest = one_hot(predicted.argmin(1), weights.shape[1]).to(weights)
        weights = weights + rate[:, None] * (smallest - weights)
    return average, weights


def initial_state(x_adv: Tensor, margins: int) -> MaxMinState:
    """Return the state before the first gradient query, for a number of margins."""
    n, pixels = len(x_adv), x_adv[0].numel()
    return MaxMinState(
        row=torch.arange(n, device=x_adv.device), x_adv=x_adv, best=x_adv,
        value=x_adv.new_full((n,), -torch.inf), values=x_adv.new_zeros(n, margins),
        grads=x_adv.new_zeros(n, margins, pixels), step_fraction=x_adv.new_ones(n),
        weights=x_adv.new_full((n, margins), 1 / margins), games=x_adv.new_zeros(n),
    )  # fmt: skip
