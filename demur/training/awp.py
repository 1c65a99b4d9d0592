"""Adversarial weight perturbation (Wu et al. 2020): train on the loss at worse nearby weights.

A first backward pass gives the gradient g of the loss at the weights w. Every weight tensor with
more than one dimension moves by gamma ||w|| g / ||g||. The optimiser then applies the gradient
taken at the moved weights to the original w. All work stays on the device, so that a CUDA graph
can capture it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

TINY = 1e-20  # as in the reference code: added to ||g||, so that a zero gradient moves nothing


class AWP:
    """Perturb the weights of a net for one backward pass; never synchronise with the host.

    Args:
        net: the net whose weight tensors with ndim > 1 are perturbed.
        gamma: length of the perturbation of a tensor relative to the length of the tensor.
        start: fraction of all epochs after which the perturbation begins.
    """

    def __init__(self, net: nn.Module, gamma: float, start: float) -> None:
        self.gamma, self.start = gamma, start
        # as in the paper: biases and the affine parameters of batch norm stay
        self.weights: list[Tensor] = [p for p in net.parameters() if p.ndim > 1]
        self.weights_backup = TensorBackup(self.weights)
        self.statistics_backup = TensorBackup(list(net.buffers()))
        self.current_gamma = self.weights[0].new_zeros(())

    def begin(self, progress: float) -> None:
        """Set gamma for an epoch that starts after this fraction of all epochs."""
        self.current_gamma.fill_(self.gamma if progress >= self.start else 0.0)

    @contextmanager
    def preserve_statistics(self) -> Iterator[None]:
        """Restore the running statistics of batch norm afterwards; for the first pass."""
        self.statistics_backup.save()
        try:
            yield
        finally:
            self.statistics_backup.restore()

    @contextmanager
    def perturb(self) -> Iterator[None]:
        """Move the weights along their gradients; restore them bit by bit afterwards."""
        self.weights_backup.save()
        self._move()
        try:
            yield
        finally:
            # the reference code steps from the moved weights and subtracts the movement afterwards,
            # so weight decay acts on the moved weights and a rounding error remains
            self.weights_backup.restore()

    @torch.no_grad()
    def _move(self) -> None:
        pairs = [(weight, weight.grad) for weight in self.weights if weight.grad is not None]
        weights, grads = [weight for weight, _ in pairs], [grad for _, grad in pairs]
        grad_norms = list(torch._foreach_norm(grads))
        torch._foreach_add_(grad_norms, TINY)
        scales = list(torch._foreach_norm(weights))
        torch._foreach_div_(scales, grad_norms)
        torch._foreach_mul_(scales, self.current_gamma)
        torch._foreach_add_(weights, list(torch._foreach_mul(grads, scales)))


class TensorBackup:
    """Copies of tensors that can be written back in place."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors, self.copies = tensors, [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def save(self) -> None:
        """Copy the current values of the tensors."""
        torch._foreach_copy_(self.copies, self.tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the saved values back."""
        torch._foreach_copy_(self.tensors, self.copies)
