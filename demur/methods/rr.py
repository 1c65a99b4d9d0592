"""Rectified rejection, the paper's head.

RR(weight=1.0)      # learn A so that R-Con = con * A predicts the true confidence (Eq. 6, 7)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from demur.declared import NonNegative, Positive
from demur.methods.heads import Head
from demur.methods.modules import DenseAux
from demur.methods.views import Views
from demur.output import Output, log_not_rcon, log_rcon, prediction, tcon
from demur.rejectors import Aux, Con, Coupled, RCon, Rejector


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

    def term(self, views: Views) -> Tensor:
        """The weighted RR loss of each attacked image."""
        return self.weight * self.each(views.attacked.out, views.attacked.y)

    def rejectors(self) -> dict[str, Rejector]:
        """R-Con at the temperature it was trained with, alone and behind confidence; A alone."""
        rectified = RCon(self.tau)
        coupled = Coupled(Con(self.tau), then=rectified)
        return {"R-Con": rectified, "Con+R-Con": coupled, "A": Aux()}

    def each(self, out: Output, y: Tensor) -> Tensor:
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
