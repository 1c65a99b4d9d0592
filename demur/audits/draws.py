"""Random models: whether a model is one, and the same model with one draw in all passes.

drawn = with_same_draw(model, x)     # passes of which repeat, or None
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from demur.attacks.attack_model import (
    CheckedModel,
    Gradient,
    Model,
    ObjectiveFunction,
    random_states_restored,
)
from demur.evaluate.probing import ROUNDING
from demur.output import Output, as_output

FEW, MORE_PASSES = 4, 8  # images and passes that tell whether a model is random


class SameDraw(CheckedModel):
    """A randomised model whose passes all begin with the present states of the generators.

    They are those of torch, NumPy and Python and those that the model's modules hold.
    """

    def __call__(self, x: Tensor) -> Output:
        with random_states_restored(x), self._own_restored():
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
        with random_states_restored(x), self._own_restored():  # an AttackModel has its own gradient
            return super().gradient(objective, x, y, *inputs)


def with_same_draw(model: CheckedModel, x: Tensor) -> CheckedModel | None:
    """Return a model whose passes repeat: itself, or with one draw; None if neither repeats."""
    draw = SameDraw(model.model, model.dtype)
    return next((one for one in (model, draw) if not is_random(one, x)), None)


def is_random(model: Model, x: Tensor) -> bool:
    """Return whether passes on the same images x (N, C, H, W) differ by more than rounding.

    After two passes on all images some follow on few: a draw among few choices may repeat.
    """

    def outputs(images: Tensor) -> Tensor:
        with torch.no_grad():
            out = as_output(model(images))
        return torch.cat((out.logits, out.aux.to(out.logits)), -1)

    for images, passes in ((x, 1), (x[:FEW], MORE_PASSES)):
        first = outputs(images)
        size = first.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True).clamp_min(1e-30)
        for _ in range(passes):
            if ((outputs(images) - first).nan_to_num(0).abs() > ROUNDING * size).any():
                return True
    return False
