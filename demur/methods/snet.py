"""SelectiveNet (Geifman and El-Yaniv 2019): a gate that pays for what it lets through.

SNet(coverage=0.7, weight=8)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from demur.declared import NonNegative, Share
from demur.errors import BadInput
from demur.methods.frames import Frame
from demur.methods.heads import Head
from demur.methods.modules import SelectiveAux
from demur.methods.views import Views
from demur.output import rectifier
from demur.rejectors import Aux, Rejector


@dataclass(frozen=True)
class SNet(Head):
    """A gate g that answers at least `coverage` of the images, and pays for those it answers.

    The frame's loss is weighed by g; a second classifier keeps the features whole. `weight` is the
    price of missing coverage: 32 by the authors, 8, 16 and 32 in the paper.
    """

    coverage: Share = 0.7
    weight: NonNegative = 8.0
    alpha: Share = 0.5
    divided: bool = True  # by the mean of g; the authors' paper does, their code does not

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """The gate and the second classifier."""
        return SelectiveAux(dims[-1], classes)

    def term(self, views: Views) -> Tensor:
        """The second classifier's cross-entropy of each image."""
        return cross_entropy(views.attacked.out.aux[:, 1:], views.attacked.y, reduction="none")

    def loss(self, each: Tensor, views: Views) -> Tensor:
        """The risk of what is answered, the price of missing coverage, the second classifier."""
        g = rectifier(views.attacked.out).sigmoid()
        answered = g.mean()
        risk = (g * each).mean()
        if self.divided:
            risk = risk / answered.clamp_min(torch.finfo(g.dtype).tiny)
        selective = risk + self.weight * relu(self.coverage - answered).square()
        return self.alpha * selective + (1 - self.alpha) * self.term(views).mean()

    def rejectors(self) -> dict[str, Rejector]:
        """The gate."""
        return {"SNet": Aux()}

    @property
    def by_image(self) -> bool:
        """No: coverage is that of a batch."""
        return False

    def framed(self, frame: Frame) -> Frame:
        """The frame, if each attacked image has one loss that can be weighed."""
        if not frame.one_price_an_image:
            raise BadInput(
                "SNet weighs the loss of each attacked image, and this frame also prices clean "
                "ones; use PGDAT"
            )
        return frame
