"""Energy-based detection (Liu et al. 2020): bounds on the energy of correct and wrong images.

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
    """EBD: raise the energy of inliers and lower it for outliers.

        E = logsumexp(logits), the negative of the energy of Liu et al.
        auxiliary loss = weight * (mean_in relu(m_in - E)^2 + mean_out relu(E - m_out)^2)

    Args:
        m_in: Lower bound on the energy of inliers.
        m_out: Upper bound on the energy of outliers.
        weight: Weight of the auxiliary loss.
        outside: "wrong", as in the paper: inliers are the correctly classified attacked images,
            outliers the misclassified ones, and a batch without both has loss 0. "attacked":
            inliers are the clean images, outliers the attacked ones, closest to the authors.

    Example:
        >>> from demur import EBD, PGDAT, Method
        >>> method = Method(PGDAT(), EBD(m_in=6.0, m_out=3.0))
    """

    m_in: float = 6.0
    m_out: float = 3.0
    weight: NonNegative = 0.1  # reference code: 1 by default, 0.1 in its command and the authors'
    outside: Literal["wrong", "attacked"] = "wrong"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return NoAux()

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        value = energy(outputs.attacked.out)
        too_high, too_low = relu(value - self.m_out).square(), relu(self.m_in - value).square()
        if self.outside == "attacked":
            clean_too_low = relu(self.m_in - energy(outputs.clean_outputs().out)).square()
            return self.weight * (clean_too_low + too_high)
        correct = (prediction(outputs.attacked.out) == outputs.attacked.y).to(value)
        has_both = (correct.amax() > 0) & (correct.amin() < 1)
        loss_per_image = too_low * subset_weights(correct) + too_high * subset_weights(1 - correct)
        return self.weight * torch.where(has_both, loss_per_image, torch.zeros_like(loss_per_image))

    def rejectors(self) -> dict[str, Rejector]:
        return {"Energy": Energy()}

    @property
    def needs_clean(self) -> bool:
        return self.outside == "attacked"

    @property
    def is_mean_over_images(self) -> bool:
        # outside=wrong divides by the numbers of correct and wrong predictions in the batch
        return self.outside == "attacked"
