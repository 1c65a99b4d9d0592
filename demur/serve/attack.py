"""Attack one image by PGD and show what the guard decides before and after."""

import base64
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demur.attacks import PGD
from demur.balls import Linf
from demur.guards.core import Guard
from demur.image_files import import_pillow
from demur.serve.batching import result_rows

STEPS = 20


def attack_image(guard: Guard, x: Tensor, note: str) -> dict[str, Any]:
    """Return the decisions on an image (1, C, H, W) and on its adversarial example, as JSON values.

    PGD maximises the cross-entropy of the predicted label. The adversarial example is rounded to 8
    bits, so that the image that is shown is the image that was classified.
    """
    before = guard.decide(x, [note])
    eps = max(guard.eps, 1 / 255)
    label = torch.from_numpy(before.labels).to(guard.device)
    attack = PGD(Linf(eps), steps=STEPS)
    adversarial = attack(guard.as_model(), x.to(guard.device), label).cpu()
    rounded = (adversarial * 255).round() / 255
    after = guard.decide(rounded)
    gain = 1 / (2 * eps)  # black and white are the ends of the ball
    difference = ((rounded - x) * gain + 0.5).clamp(0, 1)
    return {
        "attack": f"PGD in the Linf ball of radius {eps * 255:.3g}/255, {STEPS} steps",
        "before": result_rows(before)[0],
        "after": result_rows(after)[0],
        "images": {"before": _png(x), "after": _png(rounded), "difference": _png(difference)},
        "gain": gain,
    }


def _png(x: Tensor) -> str:
    """An image 1, C, H, W in [0, 1] as a data URL; channels other than RGB are shown as grey."""
    pixels = (x[0] * 255).round().byte().permute(1, 2, 0).numpy()
    if pixels.shape[2] != 3:
        pixels = pixels.mean(2).astype(np.uint8)
    file = io.BytesIO()
    import_pillow().fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
