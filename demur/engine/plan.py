"""Choice of the engine for a training, with its precision and memory format.

    plan = choose_plan("auto", recipe, device, world, False, say)

"auto" is "fast" on a GPU and for recipes in bf16, otherwise "plain". On a CPU "fast" means the
plain step in the precision and memory format that a short measurement finds fastest.
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
from demur.engine.trial import fastest_settings
from demur.errors import BadInput, suggestion
from demur.nets.norm import synchronise_batch_norm
from demur.precision import Precision
from demur.recipes import Recipe

ENGINES = ("auto", "plain", "fast")
MessageCallback = Callable[[str], None]


@dataclass(frozen=True)
class EnginePlan:
    """How the training steps of a recipe are computed; part of the provenance, not the recipe."""

    engine: str
    precision: Precision
    channels_last: bool = False
    sync_bn: bool = False

    def train_state(self, recipe: Recipe, device: torch.device, world: ProcessGroup) -> TrainState:
        """Return a new TrainState in this precision and memory format."""
        train_state = TrainState(recipe, device, self.channels_last, self.precision, world)
        if self.sync_bn:
            synchronise_batch_norm(train_state.net)
        return train_state

    def steps(
        self, recipe: Recipe, train_state: TrainState, fit: Images, on_message: MessageCallback
    ) -> PlainSteps:
        """Return the training steps of this engine."""
        if self.engine == "fast" and fit.y.device.type == "cuda":
            return FastSteps(recipe, train_state, fit, on_message=on_message)
        return PlainSteps(recipe, train_state, fit)

    def resumed(self, stored: dict[str, Any] | None) -> "EnginePlan":
        """Return the plan of a stored state if it used this engine: measurements may vary."""
        if stored is None or stored["engine"] != self.engine:
            return self
        return replace(self, precision=stored["precision"], channels_last=stored["channels_last"])

    def metadata(self) -> dict[str, str | bool]:
        """Return the plan as JSON values."""
        return {
            "engine": self.engine,
            "precision": self.precision,
            "channels_last": self.channels_last,
            "sync_bn": self.sync_bn,
        }


def check_engine(name: str) -> str:
    """Return the name if it is that of an engine, else raise BadInput."""
    if name not in ENGINES:
        raise BadInput(f"no engine is called {name!r}; {suggestion(name, ENGINES)}")
    return name


def choose_plan(
    name: str,
    recipe: Recipe,
    device: torch.device,
    world: ProcessGroup,
    sync_bn: bool,
    on_message: MessageCallback,
) -> EnginePlan:
    """Return the plan of the named engine for a recipe on a device; explain changes by `say`.

    Raises BadInput if there is no such engine.
    """
    synchronised = world.size > 1 and sync_bn
    engine = check_engine(name)
    if engine == "plain" or (engine == "auto" and _plain_is_default(recipe, device)):
        return EnginePlan("plain", recipe.precision, sync_bn=synchronised)
    if device.type == "cpu":
        precision, channels_last = fastest_settings(recipe)
        if precision != recipe.precision:
            on_message(f"{recipe.precision} is not faster on this CPU; computing in {precision}")
        return EnginePlan("fast", precision, channels_last, synchronised)
    if synchronised:
        on_message(
            "synchronised batch norm needs the plain engine; omit --sync-bn to use the fast one"
        )
        return EnginePlan("plain", recipe.precision, sync_bn=True)
    return EnginePlan("fast", recipe.precision, channels_last=True)


def _plain_is_default(recipe: Recipe, device: torch.device) -> bool:
    return device.type == "cpu" and recipe.precision != "bf16"
