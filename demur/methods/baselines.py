"""The heads that the paper compares RR with, as their authors have them and as the paper ran them.

EBD(m_in=6, m_out=3)            # energy-bounded detection (Liu et al. 2020)
SNet(coverage=0.7, weight=8)    # SelectiveNet (Geifman and El-Yaniv 2019)
ATRO(cost=0.3)                  # adversarial training with a rejection option (Kato et al. 2020)
CARL(weight=0.5)                # abstention by a further class (Laidlaw and Feizi 2019)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from demur.attacks.goals import Margin, RejectionHinge, Unsafe, UnsafeMargin
from demur.declared import NonNegative, Share
from demur.errors import BadInput
from demur.methods.frames import Frame
from demur.methods.heads import Head
from demur.methods.modules import DenseAux, NoAux, SelectiveAux
from demur.methods.views import Seen, Views, share_of
from demur.output import energy, prediction, rectifier
from demur.rejectors import Answers, Aux, Energy, Rejector

Form = Literal["paper", "authors"]


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

    def term(self, views: Views) -> Tensor:
        """The weighted squared hinges of each image."""
        value = energy(views.attacked.out)
        low, high = relu(value - self.m_out).square(), relu(self.m_in - value).square()
        if self.outside == "attacked":
            inside = relu(self.m_in - energy(views.unattacked().out)).square()
            return self.weight * (inside + low)
        right = (prediction(views.attacked.out) == views.attacked.y).to(value)
        both = (right.amax() > 0) & (right.amin() < 1)
        each = high * share_of(right) + low * share_of(1 - right)
        return self.weight * torch.where(both, each, torch.zeros_like(each))

    def rejectors(self) -> dict[str, Rejector]:
        """The energy."""
        return {"Energy": Energy()}

    @property
    def sees_clean(self) -> bool:
        """Whether clean images are the inside."""
        return self.outside == "attacked"

    @property
    def by_image(self) -> bool:
        """Not where right and wrong answers are counted."""
        return self.outside == "attacked"


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


@dataclass(frozen=True)
class ATRO(Head):
    """A rejector r = tanh(aux) that answers from 0 on, learned by a hinge with a cost of refusal.

    paper: the hinge, on probabilities, is added to the frame's loss. There it moves by no more
    than 1 / C when the answer turns from wrong to right, so r learns next to nothing. authors: the
    squared hinge on logits is the loss; their price on the classifier's weights is weight decay.
    """

    cost: Share = 0.3
    weight: NonNegative = 0.3
    form: Form = "paper"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Two layers."""
        return DenseAux(dims[-1])

    @property
    def hinge(self) -> RejectionHinge:
        """What is learned, and what images are crafted for."""
        return RejectionHinge(self.cost, self.form)

    def term(self, views: Views) -> Tensor:
        """The weighted hinge of each image."""
        return self.weight * self.hinge(views.attacked.out, views.attacked.y)

    def loss(self, each: Tensor, views: Views) -> Tensor:
        """The hinge beside the frame's loss, or in its place."""
        if self.form == "paper":
            return super().loss(each, views)
        return self.hinge(views.attacked.out, views.attacked.y).mean()

    def rejectors(self) -> dict[str, Rejector]:
        """The sigmoid of what r is the tanh of: the same order, one half where r is zero."""
        return {"ATRO": Aux()}

    def framed(self, frame: Frame) -> Frame:
        """The frame with images crafted for the hinge, in eval mode."""
        return frame.aimed(self.hinge, "eval")


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
