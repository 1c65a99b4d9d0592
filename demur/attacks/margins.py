"""All margins of an attacker at once: to be wrong, and to be accepted by every score."""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur.attacks.goals import Kept, Least, One
from demur.attacks.victims import Rows, Victims
from demur.gradient import gradient
from demur.output import Output


@dataclass
class Margins(Rows):
    """The margins at some images and their gradients, one row per image."""

    values: Tensor  # N, margins
    grads: Tensor  # N, margins, pixels


def margins_at(on: Victims, least: Least, x_adv: Tensor, given: Kept) -> tuple[Margins, Output]:
    """Every margin that a goal is the least of, and the output there."""
    parts = [One(least.rule, place) for place in range(given[1].shape[1])]
    looks = [gradient(on.model, part, x_adv, on.y, *given) for part in parts]
    grads = torch.stack([look.grad.flatten(1) for look in looks], 1)
    values = torch.stack([look.value for look in looks], 1).to(grads)
    return Margins(values, grads), looks[-1].out
