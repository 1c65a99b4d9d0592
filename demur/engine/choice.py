"""Which engine a training gets, and what it says when the fast one cannot be had.

    plan = plan_for("auto", recipe, device, world, False, say)      # engine, layout, arithmetic

auto is fast on a GPU and wherever a recipe allows bf16, else plain. On a CPU fast means the
memory layout and arithmetic that a short trial there finds fastest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from demur.data import Images
from demur.engine.fast import FastSteps
from demur.engine.learner import Learner
from demur.engine.steps import PlainSteps
from demur.engine.trial import fastest
from demur.errors import BadInput, suggestion
from demur.nets.norm import share_statistics
from demur.precision import Precision
from demur.recipes import Recipe
from demur.world import World

ENGINES = ("auto", "plain", "fast")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How the steps of a recipe are computed on a device; provenance, not recipe."""

    engine: str
    precision: Precision
    channels_last: bool = False
    shared_statistics: bool = False

    def learner(self, recipe: Recipe, device: torch.device, world: World) -> Learner:
        """A fresh learner laid out for this plan."""
        learner = Learner(recipe, device, self.channels_last, self.precision, world)
        if self.shared_statistics:
            share_statistics(learner.net)
        return learner

    def steps(self, recipe: Recipe, learner: Learner, fit: Images, say: Say) -> PlainSteps:
        """The steps of an epoch."""
        if self.engine == "fast" and fit.y.device.type == "cuda":
            return FastSteps(recipe, learner, fit, say=say)
        return PlainSteps(recipe, learner, fit)

    def after(self, kept: dict[str, Any] | None) -> "Plan":
        """The plan a kept state was computed by, if it was this engine: trials may vary."""
        if kept is None or kept["engine"] != self.engine:
            return self
        return replace(self, precision=kept["arithmetic"], channels_last=kept["channels_last"])

    def words(self) -> dict[str, str | bool]:
        """The plan as provenance."""
        return {
            "engine": self.engine,
            "arithmetic": self.precision,
            "channels_last": self.channels_last,
            "shared_statistics": self.shared_statistics,
        }


def check_engine(name: str) -> str:
    """The name of an engine, or a refusal."""
    if name not in ENGINES:
        raise BadInput(f"no engine is called {name!r}; {suggestion(name, ENGINES)}")
    return name


def plan_for(
    name: str,
    recipe: Recipe,
    device: torch.device,
    world: World,
    own_statistics: bool,
    say: Say,
) -> Plan:
    """How a recipe is trained on a device by the named engine."""
    shared = world.size > 1 and not own_statistics
    wanted = check_engine(name)
    if wanted == "plain" or (wanted == "auto" and _plain_by_nature(recipe, device)):
        return Plan("plain", recipe.precision, shared_statistics=shared)
    if device.type == "cpu":
        precision, channels_last = fastest(recipe)
        if precision != recipe.precision:
            say(f"{recipe.precision} does not pay on this CPU: computing in {precision}")
        return Plan("fast", precision, channels_last, shared)
    if shared:
        say("statistics shared between processes take the plain step; --own-statistics is faster")
        return Plan("plain", recipe.precision, shared_statistics=True)
    return Plan("fast", recipe.precision, channels_last=True)


def _plain_by_nature(recipe: Recipe, device: torch.device) -> bool:
    return device.type == "cpu" and recipe.precision != "bf16"
