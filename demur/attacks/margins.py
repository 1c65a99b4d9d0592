"""Attacks that see the margins of an accepted error one by one; what attacks cost in queries.

The margins are "wrong" and "accepted by each score". `MaxMinMargin` solves a linearised zero-sum
game between the image and the weights of the margins in each step. `OrthogonalAPGD` follows the
smallest margin and leaves the others unchanged to first order (after Bryniarski et al. 2022).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.attacks import kernels
from demur.attacks.apgd import APGD
from demur.attacks.attack import AcceptedError, Attack, AttackBatch, RuleCriterion
from demur.attacks.attack_model import Gradient, exact_value
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.driver import AscentState, Found, IterativeAttack, verify_success
from demur.attacks.objectives.classification import CE, ObjectiveState
from demur.attacks.objectives.rejector import MinMargin, SingleMargin
from demur.errors import BadInput
from demur.images import per_image
from demur.noise import Stream
from demur.output import Output
from demur.spec.field_types import NonNegativeInt, PositiveInt

ROUNDS = 20  # of fictitious play per step
GROW, SHRINK = 1.5, 0.5  # factors of the step fraction after a rise and after a fall
SMALLEST_NORM = 1e-20  # of a gradient that others are made orthogonal to
MIN_REMAINDER = 1e-3  # of a gradient's norm; with less left the full gradient is used


class Margins(NamedTuple):
    """Margins and their gradients, for M margins and D = C * H * W pixels."""

    values: Tensor  # N, M
    grads: Tensor  # N, M, D


def margins_at(
    batch: AttackBatch, min_margin: MinMargin, x_adv: Tensor, inputs: ObjectiveState
) -> tuple[Margins, Output]:
    """Return all margins whose minimum is `min_margin`, and the output, with M gradient queries."""
    objectives = [SingleMargin(min_margin.criterion, index) for index in range(inputs[1].shape[1])]
    found = batch.model.gradients(objectives, x_adv, batch.y, *inputs)
    grads = torch.stack([query.grad.flatten(1) for query in found], 1)
    values = torch.stack([query.value for query in found], 1).to(grads)
    return Margins(values, grads), found[-1].out


@dataclass
class MaxMinState(AscentState):
    """The state of the search; `value` is the smallest margin at x_adv."""

    values: Tensor  # all margins at `best_x`, N, M
    grads: Tensor  # their gradients, N, M, D
    step_fraction: Tensor  # of the way to the solution of the game
    weights: Tensor  # of the margins, carried over from game to game, N, M
    games: Tensor  # number of games so far

    def at(self, x_adv: Tensor, margins: Margins, candidate: Tensor) -> "MaxMinState":
        """Return the state at an iterate with the given margins."""
        value = margins.values.amin(1)
        rose = value > self.best_value
        fraction = self.step_fraction
        return replace(
            self, x_adv=x_adv, value=value, candidate=candidate,
            best_x=torch.where(per_image(rose, x_adv), x_adv, self.best_x),
            best_value=torch.where(rose, value, self.best_value),
            values=torch.where(rose[:, None], margins.values, self.values),
            grads=torch.where(rose[:, None, None], margins.grads, self.grads),
            step_fraction=torch.where(rose, (GROW * fraction).clamp(max=1), SHRINK * fraction),
        )  # fmt: skip


@dataclass(frozen=True)
class MaxMinMargin(IterativeAttack[MaxMinState]):
    """Maximise the smallest of the margins "wrong" and "accepted by each score".

    The criterion defines the margins. Each step makes one gradient query per margin.
    """

    ball: Ball
    criterion: AcceptedError
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    seed: NonNegativeInt = 0

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        _, out = exact_value(batch.model, CE(), batch.x, batch.y)
        found = Found.nothing(batch, self.criterion(out, batch.y))
        return self.best_restart(batch, found, self.restarts, stream)

    @property
    def last_step(self) -> int:
        return self.steps - 1

    def begin(self, batch: AttackBatch) -> tuple[AttackBatch, MaxMinState]:
        x_adv = self.ball.scaled_start(batch.x, self.seed, batch.index, batch.stream)
        batch = batch.prepare(MinMargin(self.criterion), x_adv)
        count = batch.objective_state[1].shape[1]
        return batch, self._query(batch, x_adv, initial_state(x_adv, count))

    def step(self, batch: AttackBatch, state: MaxMinState, step: int) -> MaxMinState:
        solution, weights = solve_game(self.ball, batch.x, state)
        way = per_image(state.step_fraction, batch.x) * (solution - state.best_x)
        x_adv = self.ball.project(batch.x, state.best_x + way)  # corrects rounding only
        return self._query(batch, x_adv, replace(state, weights=weights, games=state.games + 1))

    def _query(self, batch: AttackBatch, x_adv: Tensor, state: MaxMinState) -> MaxMinState:
        """Return the state at an iterate, after one gradient query per margin."""
        margins, out = margins_at(batch, MinMargin(self.criterion), x_adv, batch.objective_state)
        return state.at(x_adv, margins, self.criterion(out, batch.y))


def solve_game(ball: Ball, x: Tensor, state: MaxMinState) -> tuple[Tensor, Tensor]:
    """Return an approximate max-min solution of the linearised margins, and the margin weights.

    Fictitious play: each player responds to the other's average so far. The image moves to the
    point of the ball that maximises the weighted margin; the weights move to the smallest margin.
    Later games continue from the weights of earlier ones with smaller steps.
    """
    weights, average = state.weights, state.best_x
    if isinstance(ball, Linf | L2) and kernels.game_fits(state.grads):
        return kernels.play_game(
            x, average, state.values, state.grads, weights, state.games,
            ball.eps, isinstance(ball, L2), ROUNDS,
        )  # fmt: skip
    for turn in range(ROUNDS):
        rate = 2 / (turn + 2 + ROUNDS * state.games)  # N
        weighted_grad = (weights[:, :, None] * state.grads).sum(1).view_as(x)
        response = ball.farthest(x, weighted_grad)
        average = average + per_image(rate, x) * (response - average)
        delta = (average - state.best_x).flatten(1)
        predicted = state.values + (state.grads * delta[:, None]).sum(2)
        smallest = one_hot(predicted.argmin(1), weights.shape[1]).to(weights)
        weights = weights + rate[:, None] * (smallest - weights)
    return average, weights


def initial_state(x_adv: Tensor, margins: int) -> MaxMinState:
    """Return the state before the first gradient query, for a number of margins."""
    n, pixels = len(x_adv), x_adv[0].numel()
    lowest = x_adv.new_full((n,), -torch.inf)
    return MaxMinState(
        x_adv=x_adv, value=lowest, candidate=lowest > 0, best_x=x_adv, best_value=lowest,
        values=x_adv.new_zeros(n, margins), grads=x_adv.new_zeros(n, margins, pixels),
        step_fraction=x_adv.new_ones(n), weights=x_adv.new_full((n, margins), 1 / margins),
        games=x_adv.new_zeros(n),
    )  # fmt: skip


@dataclass(frozen=True)
class OrthogonalAPGD(APGD):
    """Auto-PGD with orthogonal gradients; its objective must be a `MinMargin`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.objective, MinMargin):
            raise BadInput(
                "OrthogonalAPGD needs margins; pass objective=MinMargin(AcceptedError(...))"
            )

    @classmethod
    def example(cls, ball: Ball, criterion: RuleCriterion) -> Attack:
        return cls(ball, objective=MinMargin(criterion), criterion=criterion)

    def _query(self, batch: AttackBatch, x_adv: Tensor, step: int) -> tuple[Gradient, Tensor]:
        assert isinstance(self.objective, MinMargin)
        inputs = self.objective.at_step(batch.objective_state, step, self.steps)
        margins, out = margins_at(batch, self.objective, x_adv, inputs)
        grad = orthogonal(margins.grads, margins.values.argmin(1)).view_as(x_adv)
        candidate = self.criterion(out, batch.y)
        success = verify_success(self.criterion, batch.model, x_adv, batch.y, candidate)
        return Gradient(grad, margins.values.amin(1), out), success


def orthogonal(grads: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen gradient of each image without its components along the others, N, D.

    `grads` are those of M margins, N, M, D. If less than `MIN_REMAINDER` of its norm remains, as
    for parallel gradients, the chosen one is returned unchanged.
    """
    rows = torch.arange(len(chosen), device=chosen.device)
    full = grads[rows, chosen]  # N, D
    remainder, basis = full, list[Tensor]()
    for index in range(grads.shape[1]):
        other = torch.where((chosen == index)[:, None], 0, grads[:, index])
        for axis in basis:
            other = other - (other * axis).sum(1, keepdim=True) * axis
        axis = other / other.norm(dim=1, keepdim=True).clamp_min(SMALLEST_NORM)
        basis.append(axis)
        remainder = remainder - (remainder * axis).sum(1, keepdim=True) * axis
    enough = remainder.norm(dim=1) > MIN_REMAINDER * full.norm(dim=1)
    return torch.where(per_image(enough, remainder), remainder, full)


PASSES_PER_GRADIENT = 3  # forward passes that take about as long as a gradient query


def cost(attack: Attack) -> float:
    """Return the gradient queries of each image at most; three forward passes count as one."""
    if len(attack.parts) == 1:  # a MultiTarget
        own = vars(attack)
        return cost(attack.parts[0]) * float((own.get("targets") or 1) * own.get("restarts", 1))
    margins = 2 if isinstance(attack, MaxMinMargin | OrthogonalAPGD) else 1  # of a single score
    return margins * attack.gradient_queries + attack.forward_queries / PASSES_PER_GRADIENT


def within(members: dict[str, Attack], most: int | None) -> dict[str, Attack]:
    """Return the attacks that fit into a number of gradient queries, with fewer targets or passes.

    Raises BadInput if none fits.
    """
    if most is None:
        return members
    found, left = dict[str, Attack](), float(most)
    for name, attack in members.items():
        share = min(1.0, left / cost(attack))
        fewer = {
            field: int(share * (vars(attack).get(field) or 0)) for field in ("targets", "queries")
        }
        fitting = replace(attack, **{field: value for field, value in fewer.items() if value})
        if cost(fitting) <= left:
            found[name] = fitting
            left -= cost(fitting)
    if not found:
        least = min(map(cost, members.values()))
        raise BadInput(f"no attack needs as few as {most} queries; give at least {least:.0f}")
    return found
