"""Virtual-logit matching (Wang et al. 2022): energy, less what no class explains of the feature.

ViM().fit(out, y)      # no gradient step, no outliers needed
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur.errors import BadInput
from demur.field_types import PositiveInt
from demur.output import Output, energy
from demur.rejectors.fitted import FittedScore, correct_features
from demur.rule import Rejector
from demur.spec import Spec


@dataclass(frozen=True)
class ViM(Spec, Rejector):
    """Energy minus a virtual logit: the feature's part outside its principal space, scaled.

    Without `principal` that space has half the feature's dimensions.
    """

    principal: PositiveInt | None = None

    def fit(self, out: Output, y: Tensor) -> "VirtualLogit":
        """The score of this principal space."""
        correct_features(out, y)  # refuses what no rejector could learn from
        # on the CPU, whose least squares also solve what is rank-deficient
        z, logits = (part.detach().double().cpu() for part in (out.feature, out.logits))
        width = z.shape[1]
        kept = width // 2 if self.principal is None else self.principal
        if kept >= width:
            raise BadInput(f"ViM keeps {kept} of {width} dimensions; nothing is left outside")
        origin = _origin(z, logits)
        moments = (z - origin).t() @ (z - origin) / len(z)
        outside = torch.linalg.eigh(moments).eigenvectors[:, : width - kept]  # the least come first
        lengths = ((z - origin) @ outside).norm(dim=1)
        scale = logits.amax(1).mean() / lengths.mean().clamp_min(torch.finfo(z.dtype).tiny)
        return VirtualLogit(origin.to(out.feature), (scale * outside).to(out.feature))


class VirtualLogit(FittedScore):
    """Energy minus the scaled length outside."""

    origin: Tensor  # D
    outside: Tensor  # D, D - principal

    def __init__(self, origin: Tensor, outside: Tensor) -> None:
        super().__init__()
        self.hold(origin=origin, outside=outside)

    def scored(self, out: Output) -> Tensor:
        """Energy minus the virtual logit."""
        away = (out.feature - self.origin) @ self.outside
        tiny = torch.finfo(away.dtype).tiny  # keeps the gradient of the root finite
        return energy(out) - (away**2).sum(1).clamp_min(tiny).sqrt()


def _origin(z: Tensor, logits: Tensor) -> Tensor:
    """Where a linear classifier of these features answers nothing: its weights are found again."""
    ones = torch.cat([z, z.new_ones(len(z), 1)], 1)
    layer = torch.linalg.lstsq(ones, logits, driver="gelsd").solution  # D + 1, C
    origin: Tensor = -torch.linalg.pinv(layer[:-1].t()) @ layer[-1]
    return origin
