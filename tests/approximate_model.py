"""A model in rough arithmetic: its gradients and values err, its own answer does not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur.gradient import Gradient, Model, ObjectiveFunction, exact_value, gradient
from demur.output import Output, as_output


@dataclass
class Rough:
    """What a crafter in 16 bits is to an attack; errors depend on the pixels alone."""

    net: Model
    error: float  # of each logit, at most
    asked: int = 0  # images of which the model's own answer was wanted
    exact: bool = False

    def __call__(self, x: Tensor) -> Output:
        self.asked += len(x)
        return as_output(self.net(x))

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *given: Tensor
    ) -> Gradient:
        return gradient(self.seen, objective, x, y, *given)

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *given: Tensor
    ) -> tuple[Tensor, Output]:
        return exact_value(self.seen, objective, x, y, *given)

    def seen(self, x: Tensor) -> Output:
        """The answer with errors; they have no slope."""
        out = as_output(self.net(x))
        places = torch.arange(1, out.logits.shape[-1] + 1).to(x)
        errors = (1e4 * x.detach().flatten(1).sum(1, keepdim=True) * places).sin()
        return out._replace(logits=out.logits + self.error * errors)
