"""All margins of an attacker at once: to be wrong, and to be accepted by every score."""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur.attacks.batch import AttackBatch, PerImageState
from demur.attacks.objectives import MinMargin, ObjectiveState, SingleMargin
from demur.gradient import gradient
from demur.output import Output


@dataclass
class Margins(PerImageState):
    """The margins at some images and their gradients, one row per image."""

    values: Tensor  # N, margins
    grads: Tensor  # N, margins, pixels


def margins_at(
    batch: AttackBatch, least: MinMargin, x_adv: Tensor, inputs: ObjectiveState
) -> tuple[Margins, Output]:
    """Every margin that a goal is the least of, and the output there."""
    parts = [SingleMargin(least.rule, place) for place in range(inputs[1].shape[1])]
    gradients = [gradient(batch.model, part, x_adv, batch.y, *inputs) for part in parts]
    grads = torch.stack([look.grad.flatten(1) for look in gradients], 1)
    values = torch.stack([look.value for look in gradients], 1).to(grads)
    return Margins(values, grads), gradients[-1].out
