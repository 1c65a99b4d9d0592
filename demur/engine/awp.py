"""Adversarial weight perturbation: learn from the loss where nearby weights make it larger.

Wu et al. 2020. A first pass finds the gradient g of the loss at the weights w; every weight tensor
of more than one dimension moves by gamma ||w|| g / ||g||; the gradient taken there is what the
optimiser applies to w.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from demur.engine.copies import copy_tensors

TINY = 1e-20  # reference code: added to ||g||, so that no gradient means no movement


class AWP:
    """Moves weights uphill and puts them back; nothing in it depends on the host."""

    def __init__(self, net: nn.Module, gamma: float, begins: float) -> None:
        self.gamma, self.begins = gamma, begins
        self.weights: list[Tensor] = [p for p in net.parameters() if p.ndim > 1]  # no norms
        self.kept_weights, self.kept_statistics = (
            TensorBackup(self.weights),
            TensorBackup(list(net.buffers())),
        )
        self.now = self.weights[0].new_zeros(())  # gamma of this epoch

    def begin(self, passed: float) -> None:
        """Set how far weights move, now that this share of all epochs has passed."""
        self.now.fill_(self.gamma if passed >= self.begins else 0.0)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """For the first pass: batch norm's statistics are put back, counts too."""
        self.kept_statistics.take()
        try:
            yield
        finally:
            self.kept_statistics.put()

    @contextmanager
    def perturb(self) -> Iterator[None]:
        """The weights moved along their gradients, then as they were to the last bit."""
        self.kept_weights.take()
        self._move()
        try:
            yield
        finally:
            # reference code: steps from the moved weights and subtracts the movement afterwards,
            # so weight decay pulls at the moved ones and a rounding remains
            self.kept_weights.put()

    @torch.no_grad()
    def _move(self) -> None:
        pairs = [(held, held.grad) for held in self.weights if held.grad is not None]
        weights, grads = [held for held, _ in pairs], [grad for _, grad in pairs]
        lengths = list(torch._foreach_norm(grads))
        torch._foreach_add_(lengths, TINY)
        scales = list(torch._foreach_norm(weights))
        torch._foreach_div_(scales, lengths)
        torch._foreach_mul_(scales, self.now)
        torch._foreach_add_(weights, list(torch._foreach_mul(grads, scales)))


class TensorBackup:
    """Copies of tensors, to put back where they came from."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.places, self.copies = tensors, [held.detach().clone() for held in tensors]

    @torch.no_grad()
    def take(self) -> None:
        """Remember the tensors as they are."""
        copy_tensors(self.copies, self.places)

    @torch.no_grad()
    def put(self) -> None:
        """Make the tensors what they were."""
        copy_tensors(self.places, self.copies)
