"""SelectiveNet (Geifman and El-Yaniv 2019): a selection function with a coverage constraint.

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
    """SelectiveNet: a selection function g in [0, 1] trained on the selective risk.

        selective = mean(g * loss) / mean(g) + weight * relu(coverage - mean(g))^2
        loss = alpha * selective + (1 - alpha) * CE(auxiliary classifier, y)

    The auxiliary classifier trains the features on all images, also on those that g rejects.

    Args:
        coverage: Target coverage, the share of images to accept.
        weight: Weight of the coverage constraint; the authors use 32, the paper 8, 16 and 32.
        alpha: Weight of the selective loss against the auxiliary classifier's.
        divided: Divide the risk by mean(g), as the authors' paper does and their code does not.

    Raises:
        BadInput: In a Method whose framework has no single loss per attacked image.

    Example:
        >>> from demur import PGDAT, Method, SNet
        >>> method = Method(PGDAT(), SNet(coverage=0.7, weight=8.0))
    """

    coverage: UnitInterval = 0.7
    weight: NonNegative = 8.0
    alpha: UnitInterval = 0.5
    divided: bool = True

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return SelectiveAux(dims[-1], classes)

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        return cross_entropy(outputs.attacked.out.aux[:, 1:], outputs.attacked.y, reduction="none")

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        g = rectifier_logit(outputs.attacked.out).sigmoid()
        coverage = g.mean()
        risk = (g * loss_per_image).mean()
        if self.divided:
            risk = risk / coverage.clamp_min(torch.finfo(g.dtype).tiny)
        selective = risk + self.weight * relu(self.coverage - coverage).square()
        return self.alpha * selective + (1 - self.alpha) * self.auxiliary_loss(outputs).mean()

    def rejectors(self) -> dict[str, Rejector]:
        return {"SNet": Rectifier()}

    @property
    def is_mean_over_images(self) -> bool:
        return False  # coverage is a statistic of the batch

    def adapt_framework(self, framework: Framework) -> Framework:
        if not framework.one_loss_per_image:
            raise BadInput(
                "SNet weights the loss of each attacked image, but "
                f"{type(framework).__name__} has losses of clean images too; use PGDAT"
            )
        return framework
