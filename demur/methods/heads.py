"""Heads: an auxiliary module beside the classifier, its loss, and the rejector it is trained for.

R-Con = con * A                     Eq. 6; con = max_l p_l, A = sigmoid(auxiliary output)
L_RR  = BCE(R-Con, sg(T-Con))       Eq. 7; T-Con = p_y, sg = stop-gradient
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from demur.attacks import CE, Objective, RRLoss
from demur.errors import BadInput
from demur.methods.frameworks import BatchOutputs, Framework
from demur.nets.net import Norm1d
from demur.output import ACCEPT, AuxColumn, Output, prediction
from demur.rejectors import Con, ConMinusRectifier, Coupled, RCon, Rectifier, Rejector
from demur.rejectors.certainty import Construction, RRLossKind, rr_loss_per_image, tcon
from demur.spec import Spec, later
from demur.spec.field_types import NonNegative, Positive


@dataclass(frozen=True)
class Head(Spec, ABC):
    """An auxiliary module, its loss, its rejectors, and the changes it makes to a framework.

    Example:
        >>> from dataclasses import dataclass
        >>> from demur import Con, Head, Method, Standard
        >>> from demur.methods.heads import NoAux
        >>> @dataclass(frozen=True)
        ... class Nothing(Head):
        ...     def build(self, dims, classes):
        ...         return NoAux()
        ...
        ...     def auxiliary_loss(self, outputs):
        ...         return None
        >>> method = Method(Standard(), Nothing())
    """

    columns: ClassVar[tuple[AuxColumn, ...]] = ()  # of the auxiliary output, for its rejectors

    @property
    def tau(self) -> float:
        """Softmax temperature that the auxiliary output is trained with."""
        return 1.0

    @property
    def has_weights(self) -> bool:
        """Whether the loss trains weights of the auxiliary module."""
        return bool(self.columns)

    @property
    def has_rectifier(self) -> bool:
        """Whether R-Con = con * A is fitted to T-Con (Eq. 6 and 7)."""
        return False

    @property
    def spares_backbone(self) -> bool:
        """Whether the gradient of the auxiliary loss stops at the features."""
        return False

    def attack_objective(self) -> Objective | None:
        """Return the training loss of A as an objective (the paper's L_RR), or None without A."""
        return None

    @abstractmethod
    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Return the auxiliary module: pooled features of widths `dims` to outputs (N, A)."""

    @abstractmethod
    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor | None:
        """Return the weighted auxiliary loss of each attacked image (N), or None without one."""

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        """Mean training loss of a batch: classification loss plus auxiliary loss.

        `loss_per_image` is the classification loss of each image. CCAT also has one for each clean
        image, so the shapes of both losses may differ.
        """
        auxiliary = self.auxiliary_loss(outputs)
        if auxiliary is None:
            return loss_per_image.mean()
        if loss_per_image.shape == auxiliary.shape:
            return (loss_per_image + auxiliary).mean()
        return loss_per_image.mean() + auxiliary.mean()

    def rejectors(self) -> dict[str, Rejector]:
        """Rejectors that this head is trained for, by name, the main one first."""
        return {}

    def adapt_framework(self, framework: Framework) -> Framework:
        """Framework as used with this head; raises BadInput if they cannot be combined."""
        return framework

    @property
    def needs_clean(self) -> bool:
        """Whether the loss uses the outputs for clean images."""
        return False

    @property
    def needs_input_gradient(self) -> bool:
        """Whether the loss contains a gradient with respect to the clean images."""
        return False


@dataclass(frozen=True)
class NoHead(Head):
    """No auxiliary output and no auxiliary loss: the loss is the framework's alone.

    Example:
        >>> from demur import PGDAT, Method, NoHead
        >>> method = Method(PGDAT(), NoHead())
    """

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return NoAux()

    def auxiliary_loss(self, outputs: BatchOutputs) -> None:
        return None


# ------------------------------------------------ auxiliary modules: stage features to (N, A)


class NoAux(nn.Module):
    """Auxiliary output of width 0."""

    def forward(self, stages: list[Tensor]) -> Tensor:
        return stages[-1][:, :0]


class DenseAux(nn.Module):
    """Logit of A from two layers on the last feature, as in the paper.

    `dims` of several stages: on the concatenated pooled features of all of them. `detach_features`
    stops the gradient from the auxiliary loss to the backbone in train mode. In eval mode the
    gradient flows, so that attacks on the trained net can use it.
    """

    def __init__(self, *dims: int, detach_features: bool = False) -> None:
        super().__init__()
        self.needs_all_stages, self.detach_features = len(dims) > 1, detach_features
        hidden = dims[-1] // 2
        self.layers = nn.Sequential(
            nn.Linear(sum(dims), hidden), Norm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, stages: list[Tensor]) -> Tensor:
        feature = torch.cat(stages, 1) if self.needs_all_stages else stages[-1]
        detach = self.detach_features and self.training
        logit: Tensor = self.layers(feature.detach() if detach else feature)  # N, 1
        return logit


class SelectiveAux(nn.Module):
    """SelectiveNet's selection logit (two layers) and auxiliary class logits (one layer)."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.select = DenseAux(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, stages: list[Tensor]) -> Tensor:
        return torch.cat([self.select(stages), self.classify(stages[-1])], 1)  # N, 1 + C


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
            so that the loss does not lower their confidence, "all" or "none".
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

    columns = (ACCEPT,)
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
        read = dims[-1:] if self.features == "last" else dims
        return DenseAux(*read, detach_features=self.spares_backbone)

    @property
    def has_weights(self) -> bool:
        return self.construction != "con"

    @property
    def has_rectifier(self) -> bool:
        return self.construction == "product"

    @property
    def spares_backbone(self) -> bool:
        return self.gradient_to == "head"

    @property
    def _l_rr(self) -> RRLoss:
        return RRLoss(self.tau, self.construction, self.rr_loss)

    def attack_objective(self) -> RRLoss | None:
        return self._l_rr if self.has_weights else None

    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor:
        loss_per_image = self.loss_per_image(outputs.attacked.out, outputs.attacked.y)
        if self.images == "both":
            clean = outputs.clean_outputs()
            loss_per_image = (loss_per_image + self.loss_per_image(clean.out, clean.y)) / 2
        return self.weight * loss_per_image

    def loss_per_image(self, out: Output, y: Tensor) -> Tensor:
        """L_RR of each image (Eq. 7), unweighted, with stopped gradients, N."""
        target = tcon(out, y, self.tau)
        if self.stop_tcon or self.spares_backbone:
            target = target.detach()
        stopped = out.logits.detach()
        if self.stop_con == "all" or self.spares_backbone:
            out = Output(stopped, out.feature, out.aux)
        elif self.stop_con == "correct":
            correct = (prediction(out) == y)[:, None]
            out = Output(torch.where(correct, stopped, out.logits), out.feature, out.aux)
        # the product construction computes R-Con = con * A (Eq. 6) from the stopped output
        return rr_loss_per_image(out, y, target, self.construction, self.rr_loss, self.tau)

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
        return framework.with_objective(CE() + self.weight * self._l_rr)

    @property
    def needs_clean(self) -> bool:
        return self.images == "both"
