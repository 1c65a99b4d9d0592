"""Playing it safe: an additional class that abstains (Laidlaw and Feizi 2019).

CARL(weight=0.5, grad_penalty=0.02)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demur.attacks.objectives import CARLMargin, CARLObjective, Form, UntargetedMargin
from demur.field_types import NonNegative
from demur.methods.frameworks import Framework
from demur.methods.heads import Head
from demur.methods.modules import DenseAux
from demur.methods.outputs import BatchOutputs, LabelledOutput
from demur.rejectors import AcceptProbability, Rejector


@dataclass(frozen=True)
class CARL(Head):
    """CARL: class C + 1 abstains; a gradient penalty smooths the margin of clean images.

        auxiliary loss = -weight * log(p_y + p_abstain) + grad_penalty * ||grad_x margin||_1

    The first term is of the attacked image, the second of the clean one; margin is the largest
    wrong logit minus the true one.

    Args:
        weight: Weight of the first term.
        grad_penalty: Weight of the gradient's L1 norm; 0 skips the second derivative.
        form: "paper" adds both terms to the framework's loss and divides the norm by the batch
            size, since its code differentiates a mean. "authors" replaces the framework's loss
            by cross-entropy over all C + 1 classes on clean images.

    Example:
        >>> from demur import CARL, PGDAT, Method
        >>> method = Method(PGDAT(), CARL(weight=0.5, grad_penalty=0.02))
    """

    weight: NonNegative = 0.5
    grad_penalty: NonNegative = 0.02
    form: Form = "paper"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return DenseAux(dims[-1])  # the logit of abstaining

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        loss_per_image = self.weight * CARLObjective()(outputs.attacked.out, outputs.attacked.y)
        if not self.grad_penalty:
            return loss_per_image
        return loss_per_image + self._gradient_penalty(outputs.clean_outputs())

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        if self.form == "authors":
            clean = outputs.clean_outputs()
            loss_per_image = cross_entropy(self._all_logits(clean), clean.y, reduction="none")
        return super().loss(loss_per_image, outputs)

    def rejectors(self) -> dict[str, Rejector]:
        # reference code: scores by the probability of abstaining, where higher means reject
        return {"CARL": AcceptProbability()}

    def adapt_framework(self, framework: Framework) -> Framework:
        if self.form == "paper":
            return framework.with_objective(CARLObjective())
        return framework.with_objective(CARLMargin(), "eval")

    @property
    def needs_clean(self) -> bool:
        return self.form == "authors" or self.needs_input_gradient

    @property
    def needs_input_gradient(self) -> bool:
        return self.grad_penalty > 0

    @property
    def is_mean_over_images(self) -> bool:
        # the paper's form divides the norm by the batch size once more
        return self.form == "authors" or not self.needs_input_gradient

    def _gradient_penalty(self, clean: LabelledOutput) -> Tensor:
        """Weighted L1 norm of the margin's gradient at each clean image, N."""
        out = clean.out
        if self.form == "authors":
            out = out._replace(logits=self._all_logits(clean))
        margin = UntargetedMargin()(out, clean.y).sum()
        # a backward pass uses the dtypes of its forward pass; autocast would change them
        with torch.autocast(margin.device.type, enabled=False):
            (gradient,) = torch.autograd.grad(margin, clean.x, create_graph=True)
        norms = gradient.flatten(1).abs().sum(1)
        return self.grad_penalty * (norms if self.form == "authors" else norms / len(norms))

    def _all_logits(self, labelled: LabelledOutput) -> Tensor:
        """Logits of the classes and of abstaining, N, C + 1."""
        return torch.cat([labelled.out.logits, labelled.out.aux[:, :1]], 1)
