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
    """ATRO: a rejector r = tanh(auxiliary output) trained by a hinge with a rejection cost.

        hinge = max(mean_k(1 + (r - s_k p_k) / 2), cost * (1 - r / (1 - 2 cost)))

    s_k is 1 for the true class and -1 for the others; r >= 0 accepts. Images are attacked with the
    hinge as objective, in eval mode. On probabilities the optimal r of a single image is linear
    in its true confidence, with slope 0.8 / C at cost 0.3, so r barely varies between images. For
    images with equal features it is fixed by the 2 cost quantile of their true confidence.

    Args:
        cost: Cost of a rejection, below 0.5.
        weight: Weight of the hinge in the "paper" form.
        form: "paper" adds the hinge to the framework's loss. "authors" minimises the squared
            hinge on logits instead; their penalty on the classifier's weights is weight decay.

    Example:
        >>> from demur import ATRO, PGDAT, Method
        >>> method = Method(PGDAT(), ATRO(cost=0.3))
    """

    cost: UnitInterval = 0.3
    weight: NonNegative = 0.3
    form: Form = "paper"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return DenseAux(dims[-1])

    @property
    def hinge(self) -> RejectionHinge:
        """The training loss, which is also the objective of the attack."""
        return RejectionHinge(self.cost, self.form)

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        return self.weight * self.hinge(outputs.attacked.out, outputs.attacked.y)

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        if self.form == "paper":
            return super().loss(loss_per_image, outputs)
        return self.hinge(outputs.attacked.out, outputs.attacked.y).mean()

    def rejectors(self) -> dict[str, Rejector]:
        # sigmoid orders images as tanh does, and is 1/2 where r = 0
        return {"ATRO": Rectifier()}

    def adapt_framework(self, framework: Framework) -> Framework:
        return framework.with_objective(self.hinge, "eval")
