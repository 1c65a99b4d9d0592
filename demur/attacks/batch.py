"""Images under attack, and the verification of success in fp32.

A fast model may compute gradients and values in bf16. Its outputs are approximate, so an iterate
that satisfies the success criterion there is only a *candidate*. It counts as a success after an
exact forward pass in fp32 confirms it. Candidates of approximate models are verified every
`VERIFY_EVERY` steps, because each verification makes the host wait for the GPU.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from demur.attacks.criteria import Criterion
from demur.gradient import Model, attack_model
from demur.images import per_image
from demur.output import as_output
from demur.precision import use_precision

VERIFY_EVERY = 10  # steps between verifications for an approximate model


@dataclass(frozen=True)
class AttackBatch:
    """The images under attack with the model, the labels and the indices.

    Args:
        model: The attacked model.
        x: Clean images, N, C, H, W, in [0, 1].
        y: True labels, N.
        index: The position of each image in its data set, N; it determines the image's noise.
        target: A wrong class for each image, N, or None for an untargeted attack.
    """

    model: Model
    x: Tensor
    y: Tensor
    index: Tensor
    target: Tensor | None

    def select(self, rows: Tensor) -> "AttackBatch":
        """Return the batch of the given rows (indices or a boolean mask)."""
        target = None if self.target is None else self.target[rows]
        return AttackBatch(self.model, self.x[rows], self.y[rows], self.index[rows], target)


@dataclass
class PerImageState:
    """Base class for the state of an attack: tensors with one row per image."""

    def select(self, rows: Tensor) -> Self:
        """Return the state of the given rows (indices or a boolean mask)."""
        return type(self)(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass
class Candidates(PerImageState):
    """Unverified candidate successes, for each image the one with the largest objective."""

    x_adv: Tensor
    value: Tensor  # of the objective, N
    present: Tensor  # whether the image has a candidate, N, bool

    @classmethod
    def empty(cls, x: Tensor) -> Self:
        """Return a state without candidates."""
        return cls(x, x.new_zeros(len(x)), torch.zeros(len(x), dtype=torch.bool, device=x.device))

    def update(self, x_adv: Tensor, value: Tensor, success: Tensor) -> "Candidates":
        """Add the iterates with `success`, where they have a larger objective value."""
        better = success & (~self.present | (value > self.value))
        x_adv = torch.where(per_image(better, x_adv), x_adv, self.x_adv)
        return Candidates(x_adv, torch.where(better, value, self.value), self.present | success)

    def verify(self, criterion: Criterion, batch: AttackBatch) -> Tensor:
        """Return which candidates are confirmed, N, bool."""
        return verify_success(criterion, batch.model, self.x_adv, batch.y, self.present)


def verification_interval(model: Model) -> int:
    """Return the number of steps between verifications; an exact model needs no extra pass."""
    return 1 if is_exact(model) else VERIFY_EVERY


def verify_success(
    criterion: Criterion, model: Model, x_adv: Tensor, y: Tensor, candidate: Tensor
) -> Tensor:
    """Return which candidates satisfy the criterion in an exact forward pass in fp32, N, bool.

    For an exact model the candidates are successes already and are returned as they are.
    """
    if is_exact(model):
        return candidate
    rows = candidate.nonzero()[:, 0]  # the only host-device synchronisation without candidates
    if len(rows) == 0:
        return candidate
    with torch.no_grad(), use_precision("fp32", x_adv.device):
        confirmed = criterion(as_output(model(x_adv[rows])), y[rows])
    return candidate.index_put((rows,), confirmed)


def is_exact(model: Model) -> bool:
    """Return whether gradients and values have the precision of `model(x)`."""
    return attack_model(model).exact
