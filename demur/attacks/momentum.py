"""Gradient ascent with momentum and backtracking, the attack of CCAT (Stutz et al. 2020).

    x_next, mean = propose_step(ball, x, state, grad, momentum=0.9)
    state = keep_or_undo_step(state._replace(mean=mean), x_next, value, factor=1.5, strict=False)

No function here synchronises host and device, so the attack can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from demur.balls import Ball
from demur.fused import fused
from demur.images import per_image


class MomentumState(NamedTuple):
    """The state of the ascent; every tensor has one row per image."""

    x_adv: Tensor
    mean: Tensor  # exponential moving average of the directions
    length: Tensor  # size of the next step
    value: Tensor  # of the objective that decides on backtracking, at x_adv


def initial_state(x_adv: Tensor, length: float, value: Tensor | None) -> MomentumState:
    """Return the state before the first step; without a value the first step is always kept."""
    lengths = x_adv.new_full((len(x_adv),), length)
    value = torch.full_like(lengths, -torch.inf) if value is None else value
    return MomentumState(x_adv, torch.zeros_like(x_adv), lengths, value)


@fused
def propose_step(
    ball: Ball,
    x: Tensor,
    state: MomentumState,
    grad: Tensor,
    momentum: float,
    decay: float = 1.0,
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
