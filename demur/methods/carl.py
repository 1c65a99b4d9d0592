"""Playing it safe: a further class that means "don't know" (Laidlaw and Feizi 2019).

CARL(weight=0.5, grad_penalty=0.02)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demur.attacks.objectives import CARLMargin, CARLObjective, Form, LogitMargin
from demur.field_types import NonNegative
from demur.methods.frameworks import Framework
from demur.methods.heads import Head
from demur.methods.modules import DenseAux
from demur.methods.outputs import BatchOutputs, LabelledOutput
from demur.rejectors import AcceptProbability, Rejector


@dataclass(frozen=True)
class CARL(Head):
    """A further class that means "don't know", and smooth margins on clean images.

    paper: `weight` times the price of being neither right nor abstaining is added to the frame's
    loss, and the gradient is that of a mean margin, so its norm is smaller by the batch size.
    authors: cross-entropy over all C + 1 classes on clean images in place of the frame's loss.
    """

    weight: NonNegative = 0.5
    grad_penalty: NonNegative = 0.02
    form: Form = "paper"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Two layers to the logit of abstaining."""
        return DenseAux(dims[-1])

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        """The weighted price of each attacked image, and of its clean margin's slope."""
        loss_per_image = self.weight * CARLObjective()(outputs.attacked.out, outputs.attacked.y)
        return (
            loss_per_image + self._steepness(outputs.clean_outputs())
            if self.grad_penalty
            else loss_per_image
        )

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        """The term beside the frame's loss, or beside that of all classes on clean images."""
        if self.form == "authors":
            clean = outputs.clean_outputs()
            loss_per_image = cross_entropy(self._all_logits(clean), clean.y, reduction="none")
        return super().loss(loss_per_image, outputs)

    def rejectors(self) -> dict[str, Rejector]:
        """The probability of answering."""
        # reference code: scores by the probability of abstaining, so that higher is less trusted
        return {"CARL": AcceptProbability()}

    def adapt_framework(self, framework: Framework) -> Framework:
        """The frame with images crafted to be neither right nor refused."""
        return (
            framework.with_objective(CARLObjective())
            if self.form == "paper"
            else framework.with_objective(CARLMargin(), "eval")
        )

    @property
    def needs_clean(self) -> bool:
        """Whether clean images are looked at."""
        return self.form == "authors" or self.needs_input_gradient

    @property
    def needs_input_gradient(self) -> bool:
        """Whether slopes have a price."""
        return self.grad_penalty > 0

    @property
    def is_mean_over_images(self) -> bool:
        """Not where a slope is divided by the size of the batch."""
        return self.form == "authors" or not self.needs_input_gradient

    def _steepness(self, clean: LabelledOutput) -> Tensor:
        """The weighted L1 norm of the margin's gradient at each clean image."""
        out = clean.out
        if self.form == "authors":
            out = out._replace(logits=self._all_logits(clean))
        margin = LogitMargin()(out, clean.y).sum()
        # a backward pass runs in the dtypes of the pass before it, not in those of autocast
        with torch.autocast(margin.device.type, enabled=False):
            (gradient_only,) = torch.autograd.grad(margin, clean.x, create_graph=True)
        norms = gradient_only.flatten(1).abs().sum(1)
        return self.grad_penalty * (norms if self.form == "authors" else norms / len(norms))

    def _all_logits(self, seen: LabelledOutput) -> Tensor:
        """Those of the classes and that of abstaining."""
        return torch.cat([seen.out.logits, seen.out.aux[:, :1]], 1)
