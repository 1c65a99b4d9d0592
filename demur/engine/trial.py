"""A short trial of layouts and arithmetics on the CPU at hand; only measured gains are taken.

bf16 is several times as fast as fp32 on CPUs that have matrix units for it and forty times slower
on some that have not; the same holds, less steeply, for the channels-last layout.
"""

import time

import torch

from demur.attacks import CE
from demur.gradient import gradient
from demur.precision import Precision, autocast
from demur.recipes import Recipe

BATCH = 16
LOOKS = 3
MIN_GAIN = 0.9  # a layout or arithmetic must take at most this share of the time to be worth it


def fastest(recipe: Recipe) -> tuple[Precision, bool]:
    """The arithmetic, no wider than the recipe allows, and whether channels come last."""
    usual: Precision = "fp64" if recipe.precision == "fp64" else "fp32"
    options: list[tuple[Precision, bool]] = [(usual, False), (usual, True)]
    if recipe.precision == "bf16":
        options += [("bf16", True)]
    times = {option: seconds(recipe, *option) for option in options}
    best = min(options, key=lambda option: times[option])
    return best if times[best] < MIN_GAIN * times[options[0]] else options[0]


def seconds(recipe: Recipe, precision: Precision, channels_last: bool) -> float:
    """The time of one gradient with respect to a few images."""
    domain = recipe.data.domain
    dtype = torch.float64 if precision == "fp64" else torch.float32
    net = recipe.net.build(domain, recipe.method.head).to(dtype).eval().requires_grad_(False)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net.to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.zeros(BATCH, *domain.shape, dtype=dtype).to(memory_format=layout)
    y = torch.zeros(BATCH, dtype=torch.int64)
    took = []
    with autocast(precision, x.device):
        for _ in range(LOOKS):
            began = time.perf_counter()
            gradient(net, CE(), x, y)
            took.append(time.perf_counter() - began)
    return min(took[1:])
