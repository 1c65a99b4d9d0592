"""Heads of other papers, in the forms that the paper compares with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from demur.attacks.objectives.classification import UntargetedMargin
from demur.attacks.objectives.rejector import CARLMargin, CARLObjective, Form, RejectionHinge
from demur.errors import BadInput
from demur.methods.frameworks import BatchOutputs, Framework, LabelledOutput, subset_weights
from demur.methods.heads import DenseAux, Head, NoAux, SelectiveAux
from demur.output import ABSTAIN, ACCEPT, CLASS_LOGITS, Output, prediction
from demur.rejectors import AcceptProbability, Energy, Rectifier, Rejector
from demur.rejectors.certainty import energy
from demur.spec.field_types import NonNegative, UnitInterval


@dataclass(frozen=True)
class EBD(Head):
    """EBD: raise the energy of inliers and lower it for outliers.

        E = logsumexp(logits), the negative of the energy of Liu et al.
        auxiliary loss = weight * (mean_in relu(m_in - E)^2
                                   + mean_out relu(E - m_out)^2)

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

    columns = (ACCEPT, CLASS_LOGITS)
    coverage: UnitInterval = 0.7
    weight: NonNegative = 8.0
    alpha: UnitInterval = 0.5
    divided: bool = True

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return SelectiveAux(dims[-1], classes)

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        return cross_entropy(
            CLASS_LOGITS.of(outputs.attacked.out), outputs.attacked.y, reduction="none"
        )

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        g = ACCEPT.of(outputs.attacked.out).sigmoid()
        coverage = g.mean()
        risk = (g * loss_per_image).mean()
        if self.divided:
            risk = risk / coverage.clamp_min(torch.finfo(g.dtype).tiny)
        selective = risk + self.weight * relu(self.coverage - coverage).square()
        return self.alpha * selective + (1 - self.alpha) * self.auxiliary_loss(outputs).mean()

    def rejectors(self) -> dict[str, Rejector]:
        return {"SNet": Rectifier()}

    def adapt_framework(self, framework: Framework) -> Framework:
        if not framework.one_loss_per_image:
            raise BadInput(
                "SNet weights the loss of each attacked image, but "
                f"{type(framework).__name__} has losses of clean images too; use PGDAT"
            )
        return framework


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

    columns = (ACCEPT,)
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


@dataclass(frozen=True)
class CARL(Head):
    """CARL: class C + 1 abstains; a gradient penalty smooths the margin of clean images.

        auxiliary loss = -weight * log(p_y + p_abstain)
                         + grad_penalty * ||grad_x margin||_1

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

    columns = (ABSTAIN,)
    weight: NonNegative = 0.5
    grad_penalty: NonNegative = 0.02
    form: Form = "paper"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return DenseAux(dims[-1])

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

    def _gradient_penalty(self, clean: LabelledOutput) -> Tensor:
        """Weighted L1 norm of the margin's gradient at each clean image, N."""
        out = clean.out
        if self.form == "authors":
            out = Output(self._all_logits(clean), out.feature, out.aux)
        margin = UntargetedMargin()(out, clean.y).sum()
        # a backward pass uses the dtypes of its forward pass; autocast would change them
        with torch.autocast(margin.device.type, enabled=False):
            (gradient,) = torch.autograd.grad(margin, clean.x, create_graph=True)
        norms = gradient.flatten(1).abs().sum(1)
        return self.grad_penalty * (norms if self.form == "authors" else norms / len(norms))

    def _all_logits(self, labelled: LabelledOutput) -> Tensor:
        """Logits of the classes and of abstaining, N, C + 1."""
        logits = labelled.out.logits
        return torch.cat([logits, ABSTAIN.of(labelled.out)[:, None].to(logits)], 1)
