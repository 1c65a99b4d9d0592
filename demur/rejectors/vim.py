"""Virtual-logit matching (Wang et al. 2022): energy minus a residual of the feature.

ViM().fit(out, y)      # needs no training and no outliers
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from demur.errors import BadInput
from demur.output import Output, energy
from demur.rejectors.fitted import FittedScore, correct_features
from demur.rejectors.rule import Rejector
from demur.spec.field_types import PositiveInt


@dataclass(frozen=True)
class ViM(Rejector):
    """Energy minus a virtual logit, the scaled norm of the feature outside its principal space.

        score = logsumexp(logits) - alpha * ||R^T (z - o)||

    R spans the complement of the principal space, o is the origin where the linear classifier's
    logits vanish, and alpha scales the mean norm to the mean of the largest logits.

    Args:
        principal: Dimensions of the principal space; None takes half of the feature's.

    Raises:
        BadInput: In `fit`, if `principal` is not below the feature's dimensions.

    Example:
        >>> import torch
        >>> from demur import Output, ViM
        >>> z, y = torch.randn(100, 8), torch.arange(100) % 2
        >>> score = ViM(principal=4).fit(Output(z[:, :2], z, z[:, :0]), y)
    """

    principal: PositiveInt | None = None

    def fit(self, out: Output, y: Tensor) -> "VirtualLogit":
        correct_features(out, y)  # raises for outputs that no rejector can be fitted to
        # on the CPU, where least squares also solve rank-deficient problems
        z, logits = (part.detach().double().cpu() for part in (out.feature, out.logits))
        dim = z.shape[1]
        principal = dim // 2 if self.principal is None else self.principal
        if principal >= dim:
            raise BadInput(
                f"principal={principal} of {dim} dimensions leaves no residual; use less"
            )
        origin = _origin(z, logits)
        moments = (z - origin).t() @ (z - origin) / len(z)
        residual = torch.linalg.eigh(moments).eigenvectors[:, : dim - principal]  # ascending order
        norms = ((z - origin) @ residual).norm(dim=1)
        alpha = logits.amax(1).mean() / norms.mean().clamp_min(torch.finfo(z.dtype).tiny)
        return VirtualLogit(origin.to(out.feature), (alpha * residual).to(out.feature))

    def restore(self, arrays: Mapping[str, Tensor]) -> "VirtualLogit":
        return VirtualLogit.restored(arrays)


class VirtualLogit(FittedScore):
    """Energy minus the scaled norm of the residual."""

    origin: Tensor  # D
    residual: Tensor  # D, D - principal, scaled by alpha

    def __init__(self, origin: Tensor, residual: Tensor) -> None:
        super().__init__()
        self.set_buffers(origin=origin, residual=residual)

    def score_chunk(self, out: Output) -> Tensor:
        projected = (out.feature - self.origin) @ self.residual
        tiny = torch.finfo(projected.dtype).tiny  # keeps the gradient of the root finite
        return energy(out) - (projected**2).sum(1).clamp_min(tiny).sqrt()


def _origin(z: Tensor, logits: Tensor) -> Tensor:
    """Feature (D) at which all logits are 0; the linear layer is recovered by least squares."""
    with_bias = torch.cat([z, z.new_ones(len(z), 1)], 1)
    layer = torch.linalg.lstsq(with_bias, logits, driver="gelsd").solution  # D + 1, C
    origin: Tensor = -torch.linalg.pinv(layer[:-1].t()) @ layer[-1]
    return origin
