"""Rectified rejection, the paper's head, with all that the paper says could be tried.

RR(weight=1.0)                          # A so that con * A predicts the true confidence (Eq. 6, 7)
RR(construction="difference")           # con - A instead, the paper's footnote
RR(construction="aux")                  # an ablation: A alone predicts it
RR(joint=True)                          # images are crafted against A too
RR(features="all", gradient_to="head")          # A sees every stage and changes nothing but itself
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from demur.attacks import CE, RRLoss
from demur.errors import BadInput
from demur.field_types import NonNegative, Positive
from demur.methods.frameworks import Framework
from demur.methods.heads import Head
from demur.methods.modules import BlocksAux, DenseAux
from demur.methods.outputs import BatchOutputs
from demur.output import Output, prediction, tcon
from demur.rectified import Construction, RRLossKind, rr_loss_per_image
from demur.rejectors import Con, ConMinusRectifier, Coupled, RCon, Rectifier, Rejector
from demur.spec import later


@dataclass(frozen=True)
class RR(Head):
    """Rectified rejection: R-Con is fitted to the true confidence of attacked images.

    tau is the temperature of this term and of the score it teaches, not of the classifier. The
    stop-gradients are the paper's: always on T-Con, and on the confidence where the prediction is
    right. gradient_to=head stops all gradients but those of the head's own weights.
    """

    weight: NonNegative = 1.0
    tau: Positive = 1.0
    stop_tcon: bool = True
    stop_con: Literal["correct", "all", "none"] = "correct"
    construction: Construction = field(default="product", metadata=later("product"))
    rr_loss: RRLossKind = field(default="bce", metadata=later("bce"))
    joint: bool = field(default=False, metadata=later(False))
    images: Literal["attacked", "both"] = field(default="attacked", metadata=later("attacked"))
    features: Literal["last", "all"] = field(default="last", metadata=later("last"))
    gradient_to: Literal["net", "head"] = field(default="net", metadata=later("net"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint and self.gradient_to == "head":
            raise BadInput(
                "while it learns, a head with gradient_to=head passes no gradient on to the images; "
                "joint=true needs gradient_to=net"
            )
        if self.gradient_to == "head" and self.construction == "con":
            raise BadInput("confidence alone has no head to learn with; use gradient_to=net")

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Two layers on the last feature, as in the paper, or on those of all stages."""
        apart = self.gradient_to == "head"
        return DenseAux(dims[-1], apart) if self.features == "last" else BlocksAux(dims, apart)

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        """The weighted RR loss of each attacked image, or the mean of it and the clean one's."""
        loss_per_image = self.loss_per_image(outputs.attacked.out, outputs.attacked.y)
        if self.images == "both":
            clean = outputs.clean_outputs()
            loss_per_image = (loss_per_image + self.loss_per_image(clean.out, clean.y)) / 2
        return self.weight * loss_per_image

    def rejectors(self) -> dict[str, Rejector]:
        """What was fitted, at its temperature; the product also behind confidence."""
        match self.construction:
            case "product":
                rectified = RCon(self.tau)
                coupled = Coupled(Con(self.tau), score=rectified)
                return {"R-Con": rectified, "Con+R-Con": coupled, "A": Rectifier()}
            case "difference":
                return {"R-Con": ConMinusRectifier(self.tau), "A": Rectifier()}
            case "aux":
                return {"A": Rectifier()}
            case "con":
                return {"Con (trained)": Con(self.tau)}  # "Con" is what all are compared with

    def adapt_framework(self, framework: Framework) -> Framework:
        """The frame, with images crafted for both terms where they are learned jointly."""
        if not self.joint:
            return framework
        against_a = RRLoss(self.tau, self.construction, self.rr_loss)
        return framework.with_objective(CE() + self.weight * against_a)

    @property
    def needs_clean(self) -> bool:
        """Whether clean images are in the term."""
        return self.images == "both"

    def loss_per_image(self, out: Output, y: Tensor) -> Tensor:
        """How far the certainty of each image is from its true confidence."""
        held = self.gradient_to == "head"
        target = tcon(out, y, self.tau)
        target = target.detach() if self.stop_tcon or held else target
        out = out._replace(logits=out.logits.detach()) if held else self._stopped(out, y)
        return rr_loss_per_image(out, y, target, self.construction, self.rr_loss, self.tau)

    def _stopped(self, out: Output, y: Tensor) -> Output:
        """The same values, with no gradient to the logits where the confidence is stopped."""
        if self.stop_con == "none":
            return out
        held = prediction(out) == y if self.stop_con == "correct" else torch.ones_like(y).bool()
        logits = torch.where(held[:, None], out.logits.detach(), out.logits)
        return out._replace(logits=logits)
