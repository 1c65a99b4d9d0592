"""Probe of a model on clean images before it is attacked: is it deterministic, has it gradients?

    probe(model, x, y)      # {"images": 128, "random_outputs": 0, "zero_gradients": 0}

Attacks by gradients on a model with random outputs or zero gradients overestimate its robustness.
"""

import torch
from torch import Tensor

from demur.attacks import CE
from demur.attacks.checked_model import NoGradientError
from demur.gradient import Model, gradient
from demur.output import Output, as_output
from demur.precision import tf32

PROBED = 128  # number of images
ROUNDING = 1e-4  # relative difference that two kernels may have by rounding


def probe(model: Model, x: Tensor, y: Tensor) -> dict[str, int]:
    """Count the images whose output differs between two forward passes, and zero gradients.

    Uses the first PROBED images of x (N, C, H, W) and y (N), in fp32.
    """
    x, y = x[:PROBED], y[:PROBED]
    with tf32("fp32"):
        with torch.no_grad():
            first, second = (_logits_and_aux(as_output(model(x))) for _ in range(2))
        try:
            grad = gradient(model, CE(), x, y).grad
        except NoGradientError:
            grad = torch.zeros_like(x)
    differs = (first - second).abs().amax(-1) > ROUNDING * first.abs().amax(-1)
    has_gradient = grad.flatten(1).abs().amax(1) > 0  # also False for NaN
    return {
        "images": len(x),
        "random_outputs": int(differs.sum()),
        "zero_gradients": int((~has_gradient).sum()),
    }


def _logits_and_aux(out: Output) -> Tensor:
    return torch.cat((out.logits, out.aux.to(out.logits)), -1)
