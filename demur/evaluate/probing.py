"""Probes of a model: random outputs and zero gradients; the same model with one draw in all passes.

drawn = with_same_draw(model, x)     # passes of which repeat, or None
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from demur.attacks import CE, Objective
from demur.attacks.attack_model import (
    CheckedModel,
    Gradient,
    Model,
    ObjectiveFunction,
    attack_model,
    forked_rng,
    has_no_gradient,
)
from demur.errors import NoGradientError
from demur.numerics import tf32
from demur.output import Output, as_output

PROBED = 128  # images of a probe
ROUNDING = 1e-4  # relative difference that two kernels may have by rounding


def probe(model: Model, x: Tensor, y: Tensor, objective: Objective = CE()) -> dict[str, int]:
    """Count images whose output differs between two fp32 passes, and zero gradients, of PROBED.

    Zero gradients are not counted for a `QueryModel`, which has none.
    """
    x, y = x[:PROBED], y[:PROBED]
    with tf32("fp32"):
        with torch.no_grad():
            outputs = [as_output(model(x)) for _ in range(2)]
            first, second = (torch.cat((o.logits, o.aux.to(o.logits)), -1) for o in outputs)
        try:
            grad = attack_model(model).gradient(objective, x, y).grad
        except NoGradientError:
            grad = torch.zeros_like(x)
    differs = (first - second).abs().amax(-1) > ROUNDING * first.abs().amax(-1)
    has_gradient = grad.flatten(1).abs().amax(1) > 0  # also False for NaN
    counts = {"images": len(x), "random_outputs": int(differs.sum())}
    if has_no_gradient(model):
        return counts
    return counts | {"zero_gradients": int((~has_gradient).sum())}


FEW, MORE_PASSES = 2, 32  # images and passes that tell whether a model is random


class SameDraw(CheckedModel):
    """A randomised model whose passes all begin with the present states of the generators.

    They are those of torch, NumPy and Python and those that the model's modules hold.
    """

    def __call__(self, x: Tensor) -> Output:
        with forked_rng(x), self._own_restored():
            return super().__call__(x)

    @contextmanager
    def _own_restored(self) -> Iterator[None]:
        modules = self.model.modules() if isinstance(self.model, nn.Module) else ()
        held = [value for module in modules for value in vars(module).values()]
        of_torch = [one for one in held if isinstance(one, torch.Generator)]
        of_numpy = [one.bit_generator for one in held if isinstance(one, np.random.Generator)]
        states = [one.get_state() for one in of_torch], [one.state for one in of_numpy]
        try:
            yield
        finally:
            for one, state in zip(of_torch, states[0], strict=True):
                one.set_state(state)
            for bits, values in zip(of_numpy, states[1], strict=True):
                bits.state = values

    def gradient(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        with forked_rng(x), self._own_restored():  # an AttackModel has its own gradient
            return super().gradient(objective, x, y, *inputs)


def with_same_draw(model: CheckedModel, x: Tensor) -> CheckedModel | None:
    """Return a model whose passes repeat: itself, or with one draw; None if neither repeats."""
    draw = SameDraw(model.model, model.dtype)
    return next((one for one in (model, draw) if not is_random(one, x)), None)


def is_random(model: Model, x: Tensor) -> bool:
    """Return whether passes on the same images x (N, C, H, W) differ by more than rounding.

    After two passes on all images three follow on means of two images, where decisions are close:
    noise may change labels alone. Some follow on few images: a draw among few choices may repeat.
    """

    def outputs(images: Tensor) -> Tensor:
        with torch.no_grad():
            out = as_output(model(images))
        return torch.cat((out.logits, out.aux.to(out.logits)), -1)

    for images, passes in ((x, 1), ((x + x.roll(1, 0)) / 2, 2), (x[:FEW], MORE_PASSES)):
        first = outputs(images)
        size = first.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True).clamp_min(1e-30)
        for _ in range(passes):
            if ((outputs(images) - first).nan_to_num(0).abs() > ROUNDING * size).any():
                return True
    return False
