"""The margins of an accepted error with their gradients: one to be wrong, one per score."""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur.attacks.batch import AttackBatch, PerImageState
from demur.attacks.objectives import MinMargin, ObjectiveState, SingleMargin
from demur.gradient import gradient
from demur.output import Output


@dataclass
class Margins(PerImageState):
    """Margins and their gradients, for M margins and D = C * H * W pixels."""

    values: Tensor  # N, M
    grads: Tensor  # N, M, D


def margins_at(
    batch: AttackBatch, min_margin: MinMargin, x_adv: Tensor, inputs: ObjectiveState
) -> tuple[Margins, Output]:
    """Return all margins whose minimum is `min_margin`, and the output, with M gradient queries."""
    objectives = [SingleMargin(min_margin.criterion, index) for index in range(inputs[1].shape[1])]
    gradients = [
        gradient(batch.model, objective, x_adv, batch.y, *inputs) for objective in objectives
    ]
    grads = torch.stack([query.grad.flatten(1) for query in gradients], 1)
    values = torch.stack([query.value for query in gradients], 1).to(grads)
    return Margins(values, grads), gradients[-1].out
