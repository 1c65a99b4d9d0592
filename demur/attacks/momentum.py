"""A climb that averages its directions and takes back steps that led down.

    x_next, mean = ahead(ball, x, climb, grad, momentum=0.9)
    climb = taken(climb._replace(mean=mean), x_next, value, factor=1.5, strict=False)

The attack that CCAT trains with (Stutz et al. 2020). Nothing here asks the device for an answer,
so a climb can be recorded.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from demur.balls import Ball
from demur.fused import fused
from demur.images import per_image


class MomentumState(NamedTuple):
    """Images on their way up; every tensor has one row per image."""

    x_adv: Tensor
    mean: Tensor  # of the directions so far, the latest ones most
    length: Tensor  # of the next step
    value: Tensor  # of x_adv, by what decides whether a step is taken


def begun(x_adv: Tensor, length: float, value: Tensor | None) -> MomentumState:
    """A climb before its first step; with no value to lose, that step will be taken."""
    lengths = x_adv.new_full((len(x_adv),), length)
    value = torch.full_like(lengths, -torch.inf) if value is None else value
    return MomentumState(x_adv, torch.zeros_like(x_adv), lengths, value)


@fused
def ahead(
    ball: Ball, x: Tensor, climb: MomentumState, grad: Tensor, momentum: float, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Where the next step leads, at a share of its length, and the mean direction it takes."""
    mean = momentum * climb.mean + (1 - momentum) * ball.direction(grad)
    length = per_image(share * climb.length, x)
    return ball.project(x, climb.x_adv + length * mean), mean


@fused
def taken(
    climb: MomentumState, x_next: Tensor, value: Tensor, factor: float, strict: bool
) -> MomentumState:
    """The climb after a look at the next images: those not worse are taken.

    Where they are worse the step is shortened; a strict climb also shortens one that gained
    nothing.
    """
    objective_state = value >= climb.value
    gained = value > climb.value if strict else objective_state
    return MomentumState(
        torch.where(per_image(objective_state, x_next), x_next, climb.x_adv),
        climb.mean,
        torch.where(gained, climb.length, climb.length / factor),
        torch.where(objective_state, value, climb.value),
    )
