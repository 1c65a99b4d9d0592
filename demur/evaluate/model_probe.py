"""What a few looks at clean images tell of a net, before any attack is believed.

    probe(model, x, y)      # {"images": 128, "random_outputs": 0, "zero_gradients": 0}

A net that answers at random or gives no gradient can only be attacked by who knows it.
"""

import torch
from torch import Tensor

from demur.attacks import CE
from demur.gradient import Model, gradient
from demur.output import Output, as_output
from demur.precision import tf32

PROBED = 128  # the first images
ROUNDING = 1e-4  # of the largest output: another kernel may round so much apart


def probe(model: Model, x: Tensor, y: Tensor) -> dict[str, int]:
    """How many of the first images get another answer when asked again, and have no gradient."""
    x, y = x[:PROBED], y[:PROBED]
    with tf32("fp32"):
        with torch.no_grad():
            looks = [_told(as_output(model(x))) for _ in range(2)]
        grad = gradient(model, CE(), x, y).grad
    apart = (looks[0] - looks[1]).abs().amax(-1) > ROUNDING * looks[0].abs().amax(-1)
    gradient_only = grad.flatten(1).abs().amax(1) > 0  # also False where it is not a number
    return {
        "images": len(x),
        "random_outputs": int(apart.sum()),
        "zero_gradients": int((~gradient_only).sum()),
    }


def _told(out: Output) -> Tensor:
    return torch.cat((out.logits, out.aux.to(out.logits)), -1)
