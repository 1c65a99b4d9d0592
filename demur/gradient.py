"""The one place where an attack asks a model for a gradient.

    grad, value, out = gradient(model, goal, x, y)
    grad = slope(model, goal, x, y)                     # where nobody looks at the rest

A model that brings a faster way offers it as `model.gradient`, and as `model.slope` where that is
faster still; any other callable that returns an Output or logits goes through autograd. No weight
gradient is computed. `given` are tensors, one row per image, that the goal looks at besides.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from demur.output import Output, output_of

Model = Callable[[Tensor], Output | Tensor]
GoalFunction = Callable[..., Tensor]  # of an Output, the labels, and what else it is given


class Gradient(NamedTuple):
    """The gradient of a goal at x, with the goal's value and the output there."""

    grad: Tensor  # like x
    value: Tensor  # N
    out: Output


def gradient(model: Model, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor) -> Gradient:
    """The goal's gradient with respect to each image."""
    own = getattr(model, "gradient", None)
    if own is not None:
        found: Gradient = own(goal, x, y, *given)
        return found
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        out = output_of(model(x))
        value = goal(out, y, *given)  # N
        with torch.autocast(x.device.type, enabled=False):  # a backward pass has its own dtypes
            (grad,) = torch.autograd.grad(value.sum(), x)
    return Gradient(grad, value.detach(), out.detached())


def slope(model: Model, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
    """The goal's gradient with respect to each image, and nothing else."""
    own = getattr(model, "slope", None)
    if own is not None:
        found: Tensor = own(goal, x, y, *given)
        return found
    return gradient(model, goal, x, y, *given).grad


def value_at(
    model: Model, goal: GoalFunction, x: Tensor, y: Tensor, *given: Tensor
) -> tuple[Tensor, Output]:
    """The goal's value at x and the output there, without a gradient."""
    with torch.no_grad():
        out = output_of(model(x))
        return goal(out, y, *given), out
