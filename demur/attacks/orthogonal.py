"""Auto-PGD with orthogonal gradients, after Bryniarski et al. (2022).

    OrthogonalAPGD(Linf(8/255), objective=MinMargin(criterion), criterion=criterion)

Each step follows the gradient of the smallest margin, with the components along the gradients of
the other margins removed, so that to first order they stay unchanged. Unlike the paper's
Orthogonal PGD, it uses the steps of Auto-PGD and any number of margins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur.attacks.apgd import APGD
from demur.attacks.batch import AttackBatch, verify_success
from demur.attacks.margins import margins_at
from demur.attacks.objectives import MinMargin, ObjectiveState
from demur.errors import BadInput
from demur.gradient import Gradient
from demur.images import per_image

TINY = 1e-20
MIN_REMAINDER = 1e-3  # of a gradient's norm; with less left the full gradient is used


@dataclass(frozen=True)
class OrthogonalAPGD(APGD):
    """Auto-PGD with orthogonal gradients; its objective must be a `MinMargin`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.objective, MinMargin):
            raise BadInput(
                "OrthogonalAPGD needs margins; pass objective=MinMargin(AcceptedError(...))"
            )

    def _query(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState, step: int
    ) -> tuple[Gradient, Tensor]:
        assert isinstance(self.objective, MinMargin)
        margins, out = margins_at(
            batch, self.objective, x_adv, self.objective.at_step(objective_state, step, self.steps)
        )
        grad = orthogonal(margins.grads, margins.values.argmin(1)).view_as(x_adv)
        success = verify_success(
            self.criterion, batch.model, x_adv, batch.y, self.criterion(out, batch.y)
        )
        return Gradient(grad, margins.values.amin(1), out), success


def orthogonal(grads: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen gradient of each image without its components along the others, N, D.

    If less than `MIN_REMAINDER` of its norm remains, as for parallel gradients, it is returned
    unchanged.

    Args:
        grads: The gradients of M margins, N, M, D.
        chosen: The index of the margin to follow, N.
    """
    rows = torch.arange(len(chosen), device=chosen.device)
    full = grads[rows, chosen]  # N, D
    remainder, basis = full, list[Tensor]()
    for index in range(grads.shape[1]):
        other = torch.where((chosen == index)[:, None], 0, grads[:, index])
        for axis in basis:
            other = other - (other * axis).sum(1, keepdim=True) * axis
        axis = other / other.norm(dim=1, keepdim=True).clamp_min(TINY)
        basis.append(axis)
        remainder = remainder - (remainder * axis).sum(1, keepdim=True) * axis
    enough = remainder.norm(dim=1) > MIN_REMAINDER * full.norm(dim=1)
    return torch.where(per_image(enough, remainder), remainder, full)
