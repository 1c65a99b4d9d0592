"""SelectiveNet (Geifman and El-Yaniv 2019): a gate that pays for what it lets through.

SNet(coverage=0.7, weight=8)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from demur.errors import BadInput
from demur.field_types import NonNegative, UnitInterval
from demur.methods.frameworks import Framework
from demur.methods.heads import Head
from demur.methods.modules import SelectiveAux
from demur.methods.outputs import BatchOutputs
from demur.output import rectifier_logit
from demur.rejectors import Rectifier, Rejector


@dataclass(frozen=True)
class SNet(Head):
    """A gate g that answers at least `coverage` of the images, and pays for those it answers.

    The frame's loss is weighed by g; a second classifier keeps the features whole. `weight` is the
    price of missing coverage: 32 by the authors, 8, 16 and 32 in the paper.
    """

    coverage: UnitInterval = 0.7
    weight: NonNegative = 8.0
    alpha: UnitInterval = 0.5
    divided: bool = True  # by the mean of g; the authors' paper does, their code does not

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """The gate and the second classifier."""
        return SelectiveAux(dims[-1], classes)

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        """The second classifier's cross-entropy of each image."""
        return cross_entropy(outputs.attacked.out.aux[:, 1:], outputs.attacked.y, reduction="none")

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        """The risk of what is answered, the price of missing coverage, the second classifier."""
        g = rectifier_logit(outputs.attacked.out).sigmoid()
        answered = g.mean()
        risk = (g * loss_per_image).mean()
        if self.divided:
            risk = risk / answered.clamp_min(torch.finfo(g.dtype).tiny)
        selective = risk + self.weight * relu(self.coverage - answered).square()
        return self.alpha * selective + (1 - self.alpha) * self.auxiliary_loss(outputs).mean()

    def rejectors(self) -> dict[str, Rejector]:
        """The gate."""
        return {"SNet": Rectifier()}

    @property
    def is_mean_over_images(self) -> bool:
        """No: coverage is that of a batch."""
        return False

    def adapt_framework(self, framework: Framework) -> Framework:
        """The frame, if each attacked image has one loss that can be weighed."""
        if not framework.one_loss_per_image:
            raise BadInput(
                "SNet weighs the loss of each attacked image, and this frame also prices clean "
                "ones; use PGDAT"
            )
        return framework
