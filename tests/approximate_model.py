"""A model whose gradients and values are approximate, as in bf16, with an exact forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur.attacks.attack_model import (
    AttackModel,
    Gradient,
    Model,
    ObjectiveFunction,
    attack_model,
    exact_value,
)
from demur.output import Output, as_output


@dataclass
class ApproximateModel(AttackModel):
    """Add errors to the logits of a net, as a function of the pixels, except in `__call__`."""

    net: Model
    error: float  # largest error of a logit
    exact_passes: int = 0  # images in exact forward passes
    exact: bool = False

    def __call__(self, x: Tensor) -> Output:
        self.exact_passes += len(x)
        return as_output(self.net(x))

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        return attack_model(self.approximate).gradient(objective, x, y, *inputs)

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        return exact_value(self.approximate, objective, x, y, *inputs)

    def approximate(self, x: Tensor) -> Output:
        """Return the output with errors that have no gradient."""
        out = as_output(self.net(x))
        classes = torch.arange(1, out.logits.shape[-1] + 1).to(x)
        errors = (1e4 * x.detach().flatten(1).sum(1, keepdim=True) * classes).sin()
        return out._replace(logits=out.logits + self.error * errors)
