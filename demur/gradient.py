"""Evaluations of a model by an attack: gradient queries and forward passes.

    grad, value, out = gradient(model, objective, x, y)            # one forward, one backward pass
    value, out = exact_value(model, objective, x, y)               # one forward pass in fp32

All attacks evaluate models here. A model may define `gradient`, `gradient_only` and `value` to
compute them faster, for instance in bf16. Their values are approximate; `model(x)` stays exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from demur.output import Output, as_output

Model = Callable[[Tensor], Output | Tensor]  # images (N, C, H, W) to an Output or logits (N, K)
ObjectiveFunction = Callable[..., Tensor]  # (out, y, *inputs) -> one value per image, N


class Gradient(NamedTuple):
    """The result of one gradient query."""

    grad: Tensor  # gradient of the objective with respect to x; shape of x
    value: Tensor  # value of the objective, N
    out: Output  # output of the model


def gradient(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> Gradient:
    """Return the gradient of the objective at each image, its value and the model's output.

    One call is one gradient query: a forward and a backward pass. No gradient of a weight is
    computed. If the model defines `gradient`, that method runs instead.

    Args:
        model: The attacked model.
        objective: The function that the attack maximises.
        x: Images, N, C, H, W, in [0, 1].
        y: True labels, N.
        *inputs: Further tensors that the objective takes, one row per image.
    """
    own = getattr(model, "gradient", None)
    if own is not None:
        result: Gradient = own(objective, x, y, *inputs)
        return result
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        out = as_output(model(x))
        value = objective(out, y, *inputs)  # N
        # Backward passes use the dtypes of the forward pass and must not run under autocast.
        with torch.autocast(x.device.type, enabled=False):
            (grad,) = torch.autograd.grad(value.sum(), x)
    return Gradient(grad, value.detach(), out.detached())


def gradient_only(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> Tensor:
    """Return the gradient of the objective at each image without its value and the output."""
    own = getattr(model, "gradient_only", None)
    if own is not None:
        result: Tensor = own(objective, x, y, *inputs)
        return result
    return gradient(model, objective, x, y, *inputs).grad


def approximate_value(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> tuple[Tensor, Output]:
    """Return the objective's value (N) and the output, in the precision of the gradients.

    Success read from this output is only a candidate; `attacks.driver.verify_success` confirms it
    in fp32. Without `model.value` the result is exact.
    """
    own = getattr(model, "value", None)
    if own is not None:
        result: tuple[Tensor, Output] = own(objective, x, y, *inputs)
        return result
    return exact_value(model, objective, x, y, *inputs)


def exact_value(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> tuple[Tensor, Output]:
    """Return the objective's value (N) and the output of `model(x)`, the exact forward pass."""
    with torch.no_grad():
        out = as_output(model(x))
        return objective(out, y, *inputs), out
