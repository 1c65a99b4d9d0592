"""Time memory formats and precisions on this CPU, and choose the fastest that a recipe allows.

bf16 is several times as fast as fp32 on CPUs with matrix units for it, and forty times slower on
some without. The gain of channels_last varies in the same way, though less. The plain settings
stay unless others are measurably faster.
"""

import time

import torch

from demur.attacks import CE
from demur.gradient import gradient
from demur.precision import Precision, autocast
from demur.recipes import Recipe

BATCH = 16
REPEATS = 3
MAX_TIME_RATIO = 0.9  # other settings must take at most this share of the plain settings' time


def fastest_settings(recipe: Recipe) -> tuple[Precision, bool]:
    """Return the fastest precision that the recipe allows, and whether to use channels_last."""
    plain: Precision = "fp64" if recipe.precision == "fp64" else "fp32"
    options: list[tuple[Precision, bool]] = [(plain, False), (plain, True)]
    if recipe.precision == "bf16":
        options += [("bf16", True)]
    times = {option: gradient_seconds(recipe, *option) for option in options}
    best = min(options, key=lambda option: times[option])
    return best if times[best] < MAX_TIME_RATIO * times[options[0]] else options[0]


def gradient_seconds(recipe: Recipe, precision: Precision, channels_last: bool) -> float:
    """Return the seconds of one gradient query for 16 images, without the first, cold one."""
    domain = recipe.data.domain
    dtype = torch.float64 if precision == "fp64" else torch.float32
    net = recipe.net.build(domain, recipe.method.head).to(dtype).eval().requires_grad_(False)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net.to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.zeros(BATCH, *domain.shape, dtype=dtype).to(memory_format=layout)
    y = torch.zeros(BATCH, dtype=torch.int64)
    seconds = []
    with autocast(precision, x.device):
        for _ in range(REPEATS):
            start = time.perf_counter()
            gradient(net, CE(), x, y)
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
