"""PGD adversarial training as commonly written, the baseline of the speed benchmark.

Eager fp32 with TF32 matrix products, batch norm in train mode during the attack, and
`loss.backward()` at every attack step, which also computes unused weight gradients. Only its time
is measured; `demur.training` trains recipes.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demur.data import Images
from demur.output import con, rcon, tcon
from demur.recipes import Recipe


class EagerLoop:
    """The baseline loop: `loop(i)` takes one training step on the i-th batch, in order."""

    def __init__(
        self, recipe: Recipe, fit: Images, eps: float, step_size: float, steps: int
    ) -> None:
        self.recipe, self.fit = recipe, fit
        self.eps, self.step_size, self.steps = eps, step_size, steps
        net = recipe.net.build(recipe.data.domain, recipe.method.head, recipe.seed)
        self.net: nn.Module = net.to(fit.y.device).train()
        self.optimiser = torch.optim.SGD(
            self.net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4
        )

    def __call__(self, i: int) -> None:
        """Take one training step."""
        size = self.recipe.batch_size
        first = i * size % (len(self.fit) - size + 1)
        x, y = self.fit.batch(slice(first, first + size))
        out = self.net((x + self._craft(x, y)).clamp(0, 1))
        loss = cross_entropy(out.logits, y)
        if out.aux.shape[1]:
            # Eq. 7 with R-Con = con * A (Eq. 6); con gets no gradient where the prediction is right
            confidence = torch.where(out.logits.argmax(-1) == y, con(out).detach(), con(out))
            rectified = (confidence * rcon(out) / con(out)).clamp(1e-6, 1 - 1e-6)
            loss = loss + nn.functional.binary_cross_entropy(rectified, tcon(out, y).detach())
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()

    def _craft(self, x: Tensor, y: Tensor) -> Tensor:
        """The PGD perturbations of a batch, N, C, H, W."""
        delta = torch.empty_like(x).uniform_(-self.eps, self.eps)
        delta = ((x + delta).clamp(0, 1) - x).requires_grad_()
        for _ in range(self.steps):
            cross_entropy(self.net(x + delta).logits, y).backward()
            grad = delta.grad
            assert grad is not None
            moved = (delta + self.step_size * grad.sign()).clamp(-self.eps, self.eps)
            delta = ((x + moved).clamp(0, 1) - x).detach().requires_grad_()
        return delta.detach()
