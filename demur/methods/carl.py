"""Playing it safe: a further class that means "don't know" (Laidlaw and Feizi 2019).

CARL(weight=0.5, grad_penalty=0.02)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demur.attacks.goals import Form, Margin, Unsafe, UnsafeMargin
from demur.declared import NonNegative
from demur.methods.frames import Frame
from demur.methods.heads import Head
from demur.methods.modules import DenseAux
from demur.methods.views import Seen, Views
from demur.rejectors import Answers, Rejector


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

    def term(self, views: Views) -> Tensor:
        """The weighted price of each attacked image, and of its clean margin's slope."""
        each = self.weight * Unsafe()(views.attacked.out, views.attacked.y)
        return each + self._steepness(views.unattacked()) if self.grad_penalty else each

    def loss(self, each: Tensor, views: Views) -> Tensor:
        """The term beside the frame's loss, or beside that of all classes on clean images."""
        if self.form == "authors":
            clean = views.unattacked()
            each = cross_entropy(self._all_logits(clean), clean.y, reduction="none")
        return super().loss(each, views)

    def rejectors(self) -> dict[str, Rejector]:
        """The probability of answering."""
        # reference code: scores by the probability of abstaining, so that higher is less trusted
        return {"CARL": Answers()}

    def framed(self, frame: Frame) -> Frame:
        """The frame with images crafted to be neither right nor refused."""
        return (
            frame.aimed(Unsafe()) if self.form == "paper" else frame.aimed(UnsafeMargin(), "eval")
        )

    @property
    def sees_clean(self) -> bool:
        """Whether clean images are looked at."""
        return self.form == "authors" or self.differentiates

    @property
    def differentiates(self) -> bool:
        """Whether slopes have a price."""
        return self.grad_penalty > 0

    @property
    def by_image(self) -> bool:
        """Not where a slope is divided by the size of the batch."""
        return self.form == "authors" or not self.differentiates

    def _steepness(self, clean: Seen) -> Tensor:
        """The weighted L1 norm of the margin's gradient at each clean image."""
        out = clean.out
        if self.form == "authors":
            out = out._replace(logits=self._all_logits(clean))
        margin = Margin()(out, clean.y).sum()
        # a backward pass runs in the dtypes of the pass before it, not in those of autocast
        with torch.autocast(margin.device.type, enabled=False):
            (slope,) = torch.autograd.grad(margin, clean.x, create_graph=True)
        norms = slope.flatten(1).abs().sum(1)
        return self.grad_penalty * (norms if self.form == "authors" else norms / len(norms))

    def _all_logits(self, seen: Seen) -> Tensor:
        """Those of the classes and that of abstaining."""
        return torch.cat([seen.out.logits, seen.out.aux[:, :1]], 1)
