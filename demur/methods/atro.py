"""Adversarial training with a rejection option (Kato et al. 2020).

ATRO(cost=0.3)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from demur.attacks.objectives import Form, RejectionHinge
from demur.field_types import NonNegative, UnitInterval
from demur.methods.frameworks import Framework
from demur.methods.heads import Head
from demur.methods.modules import DenseAux
from demur.methods.outputs import BatchOutputs
from demur.rejectors import Rectifier, Rejector


@dataclass(frozen=True)
class ATRO(Head):
    """A rejector r = tanh(aux) that answers from 0 on, learned by a hinge with a cost of refusal.

    paper: the hinge, on probabilities, is added to the frame's loss. For one image it is least at
    an r that rises with its true confidence in a line, by 0.8 / C at the usual cost; for images
    that look alike, at the quantile 2 cost of that. authors: the squared hinge on logits is the
    loss; their price on the classifier's weights is weight decay.
    """

    cost: UnitInterval = 0.3
    weight: NonNegative = 0.3
    form: Form = "paper"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Two layers."""
        return DenseAux(dims[-1])

    @property
    def hinge(self) -> RejectionHinge:
        """What is learned, and what images are crafted for."""
        return RejectionHinge(self.cost, self.form)

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        """The weighted hinge of each image."""
        return self.weight * self.hinge(outputs.attacked.out, outputs.attacked.y)

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        """The hinge beside the frame's loss, or in its place."""
        if self.form == "paper":
            return super().loss(loss_per_image, outputs)
        return self.hinge(outputs.attacked.out, outputs.attacked.y).mean()

    def rejectors(self) -> dict[str, Rejector]:
        """The sigmoid of what r is the tanh of: the same order, one half where r is zero."""
        return {"ATRO": Rectifier()}

    def adapt_framework(self, framework: Framework) -> Framework:
        """The frame with images crafted for the hinge, in eval mode."""
        return framework.with_objective(self.hinge, "eval")
