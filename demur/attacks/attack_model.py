"""Evaluations of a model by an attack: gradient queries and forward passes.

    grad, value, out = attack_model(net).gradient(objective, x, y)    # forward and backward pass
    value, out = exact_value(net, objective, x, y)                    # one forward pass in fp32

All attacks evaluate models by an `AttackModel`, which `attack_model` makes of any callable. It may
compute gradients and values in bf16. They are then approximate; `model(x)` stays exact.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.output import Output, as_output

Model = Callable[[Tensor], Output | Tensor]  # images (N, C, H, W) to an Output or logits (N, K)
ObjectiveFunction = Callable[..., Tensor]  # (out, y, *inputs) -> one value per image, N


class Gradient(NamedTuple):
    """The result of one gradient query."""

    grad: Tensor  # gradient of the objective with respect to x; shape of x
    value: Tensor  # value of the objective, N
    out: Output  # output of the model


class AttackModel(ABC):
    """What attacks and training frameworks call on a model.

    `attack_model` makes one from any callable. A class that computes gradients in its own way
    inherits from this one (after nn.Module, if from both) and overrides `gradient`; the other
    methods have defaults.

    Attributes:
        exact: whether `gradient` and `value` have the precision of `model(x)`.
        verify_every: steps between verifications of candidate successes of an inexact model. On a
            GPU each verification makes the host wait.
    """

    exact: bool = True
    verify_every: int = 10

    @abstractmethod
    def __call__(self, x: Tensor, /) -> Output | Tensor:
        """Return the exact output for images N, C, H, W: an Output or logits."""

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        """Return the gradient of the objective at each image, its value and the output.

        One call is one gradient query: a forward and a backward pass. No gradient of a weight is
        computed.

        Args:
            objective: The function that the attack maximises.
            x: Images, N, C, H, W, in [0, 1].
            y: True labels, N.
            *inputs: Further tensors that the objective takes, one row per image.
        """
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = as_output(self(x))
            value = objective(out, y, *inputs)  # N
            # Backward passes use the dtypes of the forward pass and must not run under autocast.
            with torch.autocast(x.device.type, enabled=False):
                (grad,) = torch.autograd.grad(value.sum(), x)
        return Gradient(grad, value.detach(), out.detached())

    def gradients(
        self, objectives: Sequence[ObjectiveFunction], x: Tensor, y: Tensor, *inputs: Tensor
    ) -> list[Gradient]:
        """Return what `gradient` returns for several objectives with the same inputs.

        A fast model needs one forward pass for all of them.
        """
        return [self.gradient(objective, x, y, *inputs) for objective in objectives]

    def gradient_only(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Tensor:
        """Return the gradient of the objective alone."""
        return self.gradient(objective, x, y, *inputs).grad

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        """Return the objective (N) and the output, in the precision of the gradient.

        Success read from this output is only a candidate unless the model is exact;
        `attacks.driver.verify_success` confirms it in fp32.
        """
        return exact_value(self, objective, x, y, *inputs)

    def drop_graphs(self) -> None:
        """Free what was captured for the objectives of an attack that has ended."""
        return

    def batch_norms(self) -> list[_BatchNorm]:
        """Return the batch norms whose momentum applies during an attack."""
        return []


class PlainModel(AttackModel):
    """A callable as an AttackModel: its gradients come from autograd."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, x: Tensor, /) -> Output | Tensor:
        return self.model(x)

    def batch_norms(self) -> list[_BatchNorm]:
        modules = self.model.modules() if isinstance(self.model, nn.Module) else ()
        return [module for module in modules if isinstance(module, _BatchNorm)]


def attack_model(model: Model) -> AttackModel:
    """Return the model itself if it is an AttackModel, else a PlainModel of it."""
    return model if isinstance(model, AttackModel) else PlainModel(model)


def exact_value(
    model: Model, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
) -> tuple[Tensor, Output]:
    """Return the objective's value (N) and the output of `model(x)`, the exact forward pass."""
    with torch.no_grad():
        out = as_output(model(x))
        return objective(out, y, *inputs), out
