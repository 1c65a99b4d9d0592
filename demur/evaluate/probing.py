"""A probe of a model before its record is made: random outputs and zero gradients."""

import torch
from torch import Tensor

from demur.attacks import CE, Objective
from demur.attacks.attack_model import Model, attack_model, has_no_gradient
from demur.errors import NoGradientError
from demur.numerics import tf32
from demur.output import as_output

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
