"""Training and attack steps made fast; the plain step is the reference."""

from demur.engine.choice import ENGINES, Plan, check_engine, plan_for
from demur.engine.crafter import Crafter, filled_up
from demur.engine.fast import FastSteps
from demur.engine.judge import Judge
from demur.engine.learner import Learner, Tensors
from demur.engine.quick import attack_compiler
from demur.engine.steps import PlainSteps

__all__ = [
    "ENGINES", "Crafter", "FastSteps", "Judge", "Learner", "PlainSteps", "Plan", "Tensors",
    "attack_compiler", "check_engine", "filled_up", "plan_for",
]  # fmt: skip
