"""The second output of the net, what it learns, and the score it is for.

RR(weight=1.0)      # learn A so that R-Con = con * A predicts the true confidence (Eq. 6, 7)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from demur.declared import NonNegative, Positive
from demur.methods.frames import Views
from demur.nets.norm import Norm1d
from demur.output import Output, log_not_rcon, log_rcon, prediction, tcon
from demur.rejectors import Aux, Con, Coupled, RCon, Rejector
from demur.spec import Spec


@dataclass(frozen=True)
class Head(Spec, ABC):
    """The auxiliary module and its loss."""

    @abstractmethod
    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module from the list of pooled stages to (N, A)."""

    @abstractmethod
    def term(self, views: Views, y: Tensor) -> Tensor | None:
        """The weighted loss of each image; None where there is nothing to learn."""

    def rejectors(self) -> dict[str, Rejector]:
        """The rejectors that this head is for, by name, its own score first."""
        return {}


class NoAux(nn.Module):
    """An auxiliary output of width 0."""

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Nothing, one row per image."""
        return stages[-1][:, :0]


class DenseAux(nn.Module):
    """The paper's A before its sigmoid: two layers on the last feature."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.layers = nn.Sequential(
            nn.Linear(dim, half), Norm1d(half), nn.ReLU(), nn.Linear(half, 1)
        )

    def forward(self, stages: list[Tensor]) -> Tensor:
        """The logit of A."""
        logit: Tensor = self.layers(stages[-1])  # N, 1
        return logit


@dataclass(frozen=True)
class Plain(Head):
    """No second output."""

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module of width 0."""
        return NoAux()

    def term(self, views: Views, y: Tensor) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class RR(Head):
    """Rectified rejection: binary cross-entropy of R-Con against the true confidence.

    tau is the temperature of this term and of the score it teaches, not of the classifier. The
    stop-gradients are the paper's: always on T-Con, and on the confidence where the prediction is
    right.
    """

    weight: NonNegative = 1.0
    tau: Positive = 1.0
    stop_tcon: bool = True
    stop_con: Literal["correct", "all", "none"] = "correct"

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """The paper's two-layer head."""
        return DenseAux(dims[-1])

    def term(self, views: Views, y: Tensor) -> Tensor:
        """The weighted RR loss of each attacked image."""
        return self.weight * self.loss(views.attacked, y)

    def rejectors(self) -> dict[str, Rejector]:
        """R-Con at the temperature it was trained with, alone and behind confidence; A alone."""
        rectified = RCon(self.tau)
        coupled = Coupled(Con(self.tau), then=rectified)
        return {"R-Con": rectified, "Con+R-Con": coupled, "A": Aux()}

    def loss(self, out: Output, y: Tensor) -> Tensor:
        """-tcon log(rcon) - (1 - tcon) log(1 - rcon); in log space, so nothing saturates."""
        # reference code: BCELoss on probabilities, each log clamped at -100
        target = tcon(out, y, self.tau)
        target = target.detach() if self.stop_tcon else target
        out = self._stopped(out, y)
        return -target * log_rcon(out, self.tau) - (1 - target) * log_not_rcon(out, self.tau)  # N

    def _stopped(self, out: Output, y: Tensor) -> Output:
        """The same values, with no gradient to the logits where the confidence is stopped."""
        if self.stop_con == "none":
            return out
        held = prediction(out) == y if self.stop_con == "correct" else torch.ones_like(y).bool()
        logits = torch.where(held[:, None], out.logits.detach(), out.logits)
        return out._replace(logits=logits)
