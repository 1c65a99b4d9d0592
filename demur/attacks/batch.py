"""Images under attack, and what attacks ask of them again and again."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from demur.attacks.criteria import Criterion
from demur.gradient import Model
from demur.images import per_image
from demur.output import as_output
from demur.precision import use_precision


@dataclass(frozen=True)
class AttackBatch:
    """Images under attack with all that is known of each."""

    model: Model
    x: Tensor
    y: Tensor
    index: Tensor
    target: Tensor | None

    def select(self, chosen: Tensor) -> "AttackBatch":
        """The chosen ones."""
        target = None if self.target is None else self.target[chosen]
        return AttackBatch(self.model, self.x[chosen], self.y[chosen], self.index[chosen], target)


@dataclass
class PerImageState:
    """Tensors that all have one row per image."""

    def select(self, chosen: Tensor) -> Self:
        """The rows of the chosen images."""
        return type(self)(*(getattr(self, f.name)[chosen] for f in fields(self)))


BLOCK = 10  # steps in which a rough model is asked nothing, so that a device never waits


@dataclass
class Candidates(PerImageState):
    """Iterates that seem broken and were not looked into yet, the most valuable of each image."""

    x_adv: Tensor
    value: Tensor  # of the goal
    made: Tensor  # whether there is one

    @classmethod
    def none(cls, x: Tensor) -> Self:
        """No claim."""
        return cls(x, x.new_zeros(len(x)), torch.zeros(len(x), dtype=torch.bool, device=x.device))

    def update(self, x_adv: Tensor, value: Tensor, broken: Tensor) -> "Candidates":
        """These, or the given ones where they seem broken and are more valuable."""
        surer = broken & (~self.made | (value > self.value))
        x_adv = torch.where(per_image(surer, x_adv), x_adv, self.x_adv)
        return Candidates(x_adv, torch.where(surer, value, self.value), self.made | broken)

    def true(self, criterion: Criterion, batch: AttackBatch) -> Tensor:
        """Which of the claims are."""
        return verify_success(criterion, batch.model, self.x_adv, batch.y, self.made)


def verification_interval(model: Model) -> int:
    """Steps after which claims are looked into: every one where that costs nothing."""
    return 1 if exact(model) else BLOCK


def verify_success(
    criterion: Criterion, model: Model, x_adv: Tensor, y: Tensor, broken: Tensor
) -> Tensor:
    """What is broken; a gradient in rough arithmetic is not taken at its word."""
    if exact(model):
        return broken
    claimed = broken.nonzero()[:, 0]  # the one question a device is asked where nothing is claimed
    if len(claimed) == 0:
        return broken
    with torch.no_grad(), use_precision("fp32", x_adv.device):
        found = criterion(as_output(model(x_adv[claimed])), y[claimed])
    return broken.index_put((claimed,), found)


def exact(model: Model) -> bool:
    """Whether gradients and values come from the model's own answer, not from rough arithmetic."""
    return bool(getattr(model, "exact", True))
