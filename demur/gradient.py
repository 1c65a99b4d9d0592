"""The one place where an attack asks a model for a gradient.

    grad, value, out = gradient(model, goal, x, y)
    grad = slope(model, goal, x, y)                     # where nobody looks at the rest
    value, out = glance(model, goal, x, y)              # without a gradient

A model may bring faster ways of its own: `model.gradient`, `.slope`, `.value`. No weight gradient
is computed. `given` are tensors, one row per image, that the goal looks at besides.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from demur.output import Output, as_output

Model = Callable[[Tensor], Output | Tensor]
ObjectiveFunction = Callable[..., Tensor]  # of an Output, the labels, and what else it is given


class Gradient(NamedTuple):
    """The gradient of a goal at x, with the goal's value and the output there."""

    grad: Tensor  # like x
    value: Tensor  # N
    out: Output


def gradient(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> Gradient:
    """The goal's gradient with respect to each image."""
    own = getattr(model, "gradient", None)
    if own is not None:
        found: Gradient = own(objective, x, y, *inputs)
        return found
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        out = as_output(model(x))
        value = objective(out, y, *inputs)  # N
        with torch.autocast(x.device.type, enabled=False):  # a backward pass has its own dtypes
            (grad,) = torch.autograd.grad(value.sum(), x)
    return Gradient(grad, value.detach(), out.detached())


def gradient_only(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> Tensor:
    """The goal's gradient with respect to each image, and nothing else."""
    own = getattr(model, "gradient_only", None)
    if own is not None:
        found: Tensor = own(objective, x, y, *inputs)
        return found
    return gradient(model, objective, x, y, *inputs).grad


def approximate_value(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> tuple[Tensor, Output]:
    """The goal's value at x and the output there, as rough as the model's gradients are."""
    own = getattr(model, "value", None)
    if own is not None:
        found: tuple[Tensor, Output] = own(objective, x, y, *inputs)
        return found
    return exact_value(model, objective, x, y, *inputs)


def exact_value(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> tuple[Tensor, Output]:
    """The goal's value at x and the output there, by the model's own answer."""
    with torch.no_grad():
        out = as_output(model(x))
        return objective(out, y, *inputs), out
