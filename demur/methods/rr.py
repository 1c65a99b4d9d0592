"""Rectified rejection, the paper's head, with all that the paper says could be tried.

RR(weight=1.0)                          # A so that con * A predicts the true confidence (Eq. 6, 7)
RR(construction="difference")           # con - A instead, the paper's footnote
RR(construction="aux")                  # an ablation: A alone predicts it
RR(joint=True)                          # images are crafted against A too
RR(blocks="all", reach="head")          # A sees every stage and changes nothing but itself
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from demur.attacks import CE, RRLoss
from demur.declared import NonNegative, Positive
from demur.errors import BadInput
from demur.methods.frames import Frame
from demur.methods.heads import Head
from demur.methods.modules import BlocksAux, DenseAux
from demur.methods.views import Views
from demur.output import Output, prediction, tcon
from demur.rectified import Construction, Objective, misfit
from demur.rejectors import Aux, Con, Coupled, Difference, RCon, Rejector
from demur.spec import later


@dataclass(frozen=True)
class RR(Head):
    """Rectified rejection: R-Con is fitted to the true confidence of attacked images.

    tau is the temperature of this term and of the score it teaches, not of the classifier. The
    stop-gradients are the paper's: always on T-Con, and on the confidence where the prediction is
    right. reach=head stops all gradients but those of the head's own weights.
    """

    weight: NonNegative = 1.0
    tau: Positive = 1.0
    stop_tcon: bool = True
    stop_con: Literal["correct", "all", "none"] = "correct"
    construction: Construction = field(default="product", metadata=later("product"))
    objective: Objective = field(default="bce", metadata=later("bce"))
    joint: bool = field(default=False, metadata=later(False))
    on: Literal["attacked", "both"] = field(default="attacked", metadata=later("attacked"))
    blocks: Literal["last", "all"] = field(default="last", metadata=later("last"))
    reach: Literal["net", "head"] = field(default="net", metadata=later("net"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint and self.reach == "head":
            raise BadInput(
                "while it learns, a head with reach=head passes no gradient on to the images; "
                "joint=true needs reach=net"
            )
        if self.reach == "head" and self.construction == "con":
            raise BadInput("confidence alone has no head to learn with; use reach=net")

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Two layers on the last feature, as in the paper, or on those of all stages."""
        apart = self.reach == "head"
        return DenseAux(dims[-1], apart) if self.blocks == "last" else BlocksAux(dims, apart)

    def term(self, views: Views) -> Tensor:
        """The weighted RR loss of each attacked image, or the mean of it and the clean one's."""
        each = self.each(views.attacked.out, views.attacked.y)
        if self.on == "both":
            clean = views.unattacked()
            each = (each + self.each(clean.out, clean.y)) / 2
        return self.weight * each

    def rejectors(self) -> dict[str, Rejector]:
        """What was fitted, at its temperature; the product also behind confidence."""
        match self.construction:
            case "product":
                rectified = RCon(self.tau)
                coupled = Coupled(Con(self.tau), then=rectified)
                return {"R-Con": rectified, "Con+R-Con": coupled, "A": Aux()}
            case "difference":
                return {"R-Con": Difference(self.tau), "A": Aux()}
            case "aux":
                return {"A": Aux()}
            case "con":
                return {"Con (trained)": Con(self.tau)}  # "Con" is what all are compared with

    def framed(self, frame: Frame) -> Frame:
        """The frame, with images crafted for both terms where they are learned jointly."""
        if not self.joint:
            return frame
        against_a = RRLoss(self.tau, self.construction, self.objective)
        return frame.aimed(CE() + self.weight * against_a)

    @property
    def sees_clean(self) -> bool:
        """Whether clean images are in the term."""
        return self.on == "both"

    def each(self, out: Output, y: Tensor) -> Tensor:
        """How far the certainty of each image is from its true confidence."""
        held = self.reach == "head"
        target = tcon(out, y, self.tau)
        target = target.detach() if self.stop_tcon or held else target
        out = out._replace(logits=out.logits.detach()) if held else self._stopped(out, y)
        return misfit(out, y, target, self.construction, self.objective, self.tau)

    def _stopped(self, out: Output, y: Tensor) -> Output:
        """The same values, with no gradient to the logits where the confidence is stopped."""
        if self.stop_con == "none":
            return out
        held = prediction(out) == y if self.stop_con == "correct" else torch.ones_like(y).bool()
        logits = torch.where(held[:, None], out.logits.detach(), out.logits)
        return out._replace(logits=logits)
