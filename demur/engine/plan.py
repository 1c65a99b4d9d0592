"""Choice of the engine for a training, with its precision and memory format.

On a CPU "fast" means the plain step in the precision and memory format that a short measurement
finds fastest: bf16 is several times as fast as fp32 on CPUs with matrix units, and forty times
slower on some without.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from demur.attacks import CE
from demur.attacks.attack_model import PlainModel
from demur.errors import BadInput, suggestion
from demur.numerics import Precision, autocast
from demur.recipes import Recipe

ENGINES = ("auto", "plain", "fast")
MessageCallback = Callable[[str], None]
TRIAL_IMAGES = 16
TRIAL_REPEATS = 3
MAX_TIME_RATIO = 0.9  # other settings must take at most this share of the plain settings' time


@dataclass(frozen=True)
class EnginePlan:
    """How the training steps of a recipe are computed; part of the provenance, not the recipe."""

    engine: str
    precision: Precision
    channels_last: bool = False

    def resumed(self, stored: dict[str, Any] | None) -> "EnginePlan":
        """Return the plan of a stored state if it used this engine: measurements may vary."""
        if stored is None or stored["engine"] != self.engine:
            return self
        return replace(self, precision=stored["precision"], channels_last=stored["channels_last"])


def check_engine(name: str) -> str:
    """Return the name if it is that of an engine, else raise BadInput."""
    if name not in ENGINES:
        raise BadInput(f"no engine is called {name!r}; {suggestion(name, ENGINES)}")
    return name


def choose_plan(
    name: str, recipe: Recipe, device: torch.device, on_message: MessageCallback
) -> EnginePlan:
    """Return the plan of a named engine for a recipe on a device; `on_message` gets the reason."""
    engine = check_engine(name)
    prefers_plain = device.type == "cpu" and recipe.precision != "bf16"
    if engine == "plain" or (engine == "auto" and prefers_plain):
        return EnginePlan("plain", recipe.precision)
    if device.type == "cpu":
        precision, channels_last = fastest_settings(recipe)
        if precision != recipe.precision:
            on_message(f"{recipe.precision} is not faster on this CPU; computing in {precision}")
        return EnginePlan("fast", precision, channels_last)
    return EnginePlan("fast", recipe.precision, channels_last=True)


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
    x = torch.zeros(TRIAL_IMAGES, *domain.shape, dtype=dtype).to(memory_format=layout)
    y = torch.zeros(TRIAL_IMAGES, dtype=torch.int64)
    seconds = []
    with autocast(precision, x.device):
        for _ in range(TRIAL_REPEATS):
            start = time.perf_counter()
            PlainModel(net).gradient(CE(), x, y)
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
