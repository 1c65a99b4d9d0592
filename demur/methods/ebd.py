"""Energy-bounded detection (Liu et al. 2020): high energy where right, low where wrong.

EBD(m_in=6, m_out=3)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from demur.field_types import NonNegative
from demur.methods.heads import Head
from demur.methods.modules import NoAux
from demur.methods.outputs import BatchOutputs, subset_weights
from demur.output import energy, prediction
from demur.rejectors import Energy, Rejector


@dataclass(frozen=True)
class EBD(Head):
    """Energy (log-sum-exp of logits) above `m_in` inside and below `m_out` outside.

    wrong: inside are attacked images that are answered rightly, outside those answered wrongly,
    as the paper has it; a batch of one kind alone teaches nothing. attacked: inside are clean
    images, outside attacked ones, the closest to the authors' outliers.
    """

    m_in: float = 6.0
    m_out: float = 3.0
    weight: NonNegative = 0.1  # reference code: 1 by default, 0.1 in its command and the authors'
    outside: Literal["wrong", "attacked"] = "wrong"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module of width 0."""
        return NoAux()

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        """The weighted squared hinges of each image."""
        value = energy(outputs.attacked.out)
        low, high = relu(value - self.m_out).square(), relu(self.m_in - value).square()
        if self.outside == "attacked":
            inside = relu(self.m_in - energy(outputs.clean_outputs().out)).square()
            return self.weight * (inside + low)
        right = (prediction(outputs.attacked.out) == outputs.attacked.y).to(value)
        both = (right.amax() > 0) & (right.amin() < 1)
        loss_per_image = high * subset_weights(right) + low * subset_weights(1 - right)
        return self.weight * torch.where(both, loss_per_image, torch.zeros_like(loss_per_image))

    def rejectors(self) -> dict[str, Rejector]:
        """The energy."""
        return {"Energy": Energy()}

    @property
    def needs_clean(self) -> bool:
        """Whether clean images are the inside."""
        return self.outside == "attacked"

    @property
    def is_mean_over_images(self) -> bool:
        """Not where right and wrong answers are counted."""
        return self.outside == "attacked"
