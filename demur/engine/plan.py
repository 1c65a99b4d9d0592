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
from demur.distributed import ProcessGroup
from demur.engine.fast import FastSteps
from demur.engine.steps import PlainSteps
from demur.engine.train_state import TrainState
from demur.engine.trial import fastest
from demur.errors import BadInput, suggestion
from demur.nets.norm import synchronise_batch_norm
from demur.precision import Precision
from demur.recipes import Recipe

ENGINES = ("auto", "plain", "fast")
Say = Callable[[str], None]


@dataclass(frozen=True)
class EnginePlan:
    """How the steps of a recipe are computed on a device; provenance, not recipe."""

    engine: str
    precision: Precision
    channels_last: bool = False
    sync_bn: bool = False

    def train_state(self, recipe: Recipe, device: torch.device, world: ProcessGroup) -> TrainState:
        """A fresh learner laid out for this plan."""
        train_state = TrainState(recipe, device, self.channels_last, self.precision, world)
        if self.sync_bn:
            synchronise_batch_norm(train_state.net)
        return train_state

    def steps(self, recipe: Recipe, train_state: TrainState, fit: Images, say: Say) -> PlainSteps:
        """The steps of an epoch."""
        if self.engine == "fast" and fit.y.device.type == "cuda":
            return FastSteps(recipe, train_state, fit, say=say)
        return PlainSteps(recipe, train_state, fit)

    def after(self, kept: dict[str, Any] | None) -> "EnginePlan":
        """The plan a kept state was computed by, if it was this engine: trials may vary."""
        if kept is None or kept["engine"] != self.engine:
            return self
        return replace(self, precision=kept["precision"], channels_last=kept["channels_last"])

    def words(self) -> dict[str, str | bool]:
        """The plan as provenance."""
        return {
            "engine": self.engine,
            "precision": self.precision,
            "channels_last": self.channels_last,
            "sync_bn": self.sync_bn,
        }


def check_engine(name: str) -> str:
    """The name of an engine, or a refusal."""
    if name not in ENGINES:
        raise BadInput(f"no engine is called {name!r}; {suggestion(name, ENGINES)}")
    return name


def choose_plan(
    name: str,
    recipe: Recipe,
    device: torch.device,
    world: ProcessGroup,
    sync_bn: bool,
    say: Say,
) -> EnginePlan:
    """How a recipe is trained on a device by the named engine."""
    shared = world.size > 1 and sync_bn
    wanted = check_engine(name)
    if wanted == "plain" or (wanted == "auto" and _plain_by_nature(recipe, device)):
        return EnginePlan("plain", recipe.precision, sync_bn=shared)
    if device.type == "cpu":
        precision, channels_last = fastest(recipe)
        if precision != recipe.precision:
            say(f"{recipe.precision} does not pay on this CPU: computing in {precision}")
        return EnginePlan("fast", precision, channels_last, shared)
    if shared:
        say("synchronised batch norm takes the plain step; without --sync-bn the fast one is used")
        return EnginePlan("plain", recipe.precision, sync_bn=True)
    return EnginePlan("fast", recipe.precision, channels_last=True)


def _plain_by_nature(recipe: Recipe, device: torch.device) -> bool:
    return device.type == "cpu" and recipe.precision != "bf16"
