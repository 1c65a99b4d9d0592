"""Rectified rejection (RR), the head of the paper.

    R-Con = con * A                     Eq. 6; con = max_l p_l, A = sigmoid(auxiliary output)
    L_RR  = BCE(R-Con, sg(T-Con))       Eq. 7; T-Con = p_y, sg = stop-gradient

The paper also stops the gradient through con where the prediction is correct, so that L_RR does not
lower the confidence of correct predictions. Both stop-gradients are in `RR.stop_gradients`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from demur.attacks import CE, RRLoss
from demur.errors import BadInput
from demur.methods.frameworks import BatchOutputs, Framework
from demur.methods.heads import BlocksAux, DenseAux, Head
from demur.output import (
    ACCEPT,
    AuxColumn,
    Construction,
    Output,
    RRLossKind,
    prediction,
    rr_loss_per_image,
    tcon,
)
from demur.rejectors import Con, ConMinusRectifier, Coupled, RCon, Rectifier, Rejector
from demur.spec import later
from demur.spec.field_types import NonNegative, Positive


@dataclass(frozen=True)
class RR(Head):
    """Rectified rejection: fit R-Con to the true confidence of attacked images.

        auxiliary loss = weight * BCE(con * A, sg(T-Con))       (Eq. 6 and 7)

    The defaults are the paper's; every other value is an ablation or a variant.

    Args:
        weight: Weight of the auxiliary loss.
        tau: Softmax temperature of con and T-Con in this loss and in the trained score. The
            classification loss keeps temperature 1.
        stop_tcon: Stop the gradient through T-Con.
        stop_con: Predictions for which the gradient through con is stopped: the "correct" ones,
            "all" or "none".
        construction: What is fitted to T-Con: "product" con * A, "difference" con - A (the
            paper's footnote), "aux" A alone, or "con" alone.
        rr_loss: Loss between R-Con and T-Con; see `demur.output.rr_loss_per_image`.
        joint: Attack training images with CE + weight * L_RR instead of CE.
        images: Fit "attacked" images, or "both" attacked and clean ones with equal weight.
        features: Input of A: the "last" feature, or the pooled features of "all" stages.
        gradient_to: "net" lets the loss train the backbone too; "head" trains A alone.

    Raises:
        BadInput: If gradient_to="head" is combined with joint=True or construction="con".

    Example:
        >>> from demur import PGDAT, RR, Method
        >>> method = Method(PGDAT(), RR(weight=1.0))
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
                "gradient_to=head stops the gradient from A to the images in train mode, so an "
                "attack cannot use it; joint=true needs gradient_to=net"
            )
        if self.gradient_to == "head" and self.construction == "con":
            raise BadInput("construction=con has no A to train; use gradient_to=net")

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        detach = self.spares_backbone
        return DenseAux(dims[-1], detach) if self.features == "last" else BlocksAux(dims, detach)

    @property
    def columns(self) -> tuple[AuxColumn, ...]:
        return (ACCEPT,)

    @property
    def has_weights(self) -> bool:
        return self.construction != "con"

    @property
    def has_rectifier(self) -> bool:
        return self.construction == "product"

    @property
    def spares_backbone(self) -> bool:
        return self.gradient_to == "head"

    def attack_objective(self) -> RRLoss | None:
        if not self.has_weights:
            return None
        return RRLoss(self.tau, self.construction, self.rr_loss)

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        loss_per_image = self.loss_per_image(outputs.attacked.out, outputs.attacked.y)
        if self.images == "both":
            clean = outputs.clean_outputs()
            loss_per_image = (loss_per_image + self.loss_per_image(clean.out, clean.y)) / 2
        return self.weight * loss_per_image

    def loss_per_image(self, out: Output, y: Tensor) -> Tensor:
        """L_RR of each image (Eq. 7), unweighted, N."""
        out, target = self.stop_gradients(out, tcon(out, y, self.tau), y)
        # the product construction computes R-Con = con * A (Eq. 6) from the stopped output
        return rr_loss_per_image(out, y, target, self.construction, self.rr_loss, self.tau)

    def stop_gradients(self, out: Output, t_con: Tensor, y: Tensor) -> tuple[Output, Tensor]:
        """Output and T-Con with the same values, detached as `stop_con` and `stop_tcon` say."""
        if self.stop_tcon or self.spares_backbone:
            t_con = t_con.detach()
        if self.stop_con == "all" or self.spares_backbone:
            return out._replace(logits=out.logits.detach()), t_con
        if self.stop_con == "correct":
            correct = prediction(out) == y
            logits = torch.where(correct[:, None], out.logits.detach(), out.logits)
            return out._replace(logits=logits), t_con
        return out, t_con

    def rejectors(self) -> dict[str, Rejector]:
        match self.construction:
            case "product":
                rcon = RCon(self.tau)
                coupled = Coupled(Con(self.tau), score=rcon)
                return {"R-Con": rcon, "Con+R-Con": coupled, "A": Rectifier()}
            case "difference":
                return {"R-Con": ConMinusRectifier(self.tau), "A": Rectifier()}
            case "aux":
                return {"A": Rectifier()}
            case "con":
                return {"Con (trained)": Con(self.tau)}  # "Con" names the baseline of every run

    def adapt_framework(self, framework: Framework) -> Framework:
        if not self.joint:
            return framework
        l_rr = RRLoss(self.tau, self.construction, self.rr_loss)
        return framework.with_objective(CE() + self.weight * l_rr)

    @property
    def needs_clean(self) -> bool:
        return self.images == "both"
