"""Auto-PGD that raises what is behind without giving up what is won.

    OrthogonalAPGD(Linf(8/255), objective=MinMargin(rule), criterion=rule)

The idea of Bryniarski et al. (2022): along the sum of two gradients, what one aim gains the other
may lose again. Each step follows the part of the least margin's gradient that leaves the other
margins as they are.
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
GONE = 1e-3  # of a gradient: when no more is left, it is taken whole


@dataclass(frozen=True)
class OrthogonalAPGD(APGD):
    """Auto-PGD with orthogonal gradients; the goal must be `MinMargin`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.objective, MinMargin):
            raise BadInput(
                "OrthogonalAPGD raises margins; give it objective=MinMargin(AcceptedError(...))"
            )

    def _look(
        self, batch: AttackBatch, x_adv: Tensor, objective_state: ObjectiveState, step: int
    ) -> tuple[Gradient, Tensor]:
        """The orthogonal gradient of the least margin, that margin, and what is broken."""
        assert isinstance(self.objective, MinMargin)
        margins, out = margins_at(
            batch, self.objective, x_adv, self.objective.at_step(objective_state, step, self.steps)
        )
        grad = orthogonal(margins.grads, margins.values.argmin(1)).view_as(x_adv)
        broken = verify_success(
            self.criterion, batch.model, x_adv, batch.y, self.criterion(out, batch.y)
        )
        return Gradient(grad, margins.values.amin(1), out), broken


def orthogonal(grads: Tensor, chosen: Tensor) -> Tensor:
    """The chosen gradient of each image less what of it lies along the others.

    Where nothing is left of it, as when margins are one and the same, it stays whole.
    """
    rows = torch.arange(len(chosen), device=chosen.device)
    wanted = grads[rows, chosen]  # N, pixels
    left, basis = wanted, list[Tensor]()
    for place in range(grads.shape[1]):
        other = torch.where((chosen == place)[:, None], 0, grads[:, place])
        for axis in basis:
            other = other - (other * axis).sum(1, keepdim=True) * axis
        axis = other / other.norm(dim=1, keepdim=True).clamp_min(TINY)
        basis.append(axis)
        left = left - (left * axis).sum(1, keepdim=True) * axis
    whole = left.norm(dim=1) > GONE * wanted.norm(dim=1)
    return torch.where(per_image(whole, left), left, wanted)
