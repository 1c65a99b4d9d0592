"""The engine: training steps and gradient queries, eager ("plain") or fast.

The plain step is the reference. The fast one uses CUDA graphs, torch.compile and Triton kernels
and ends with the same weights up to rounding.
"""

from demur.engine.fast import FastSteps
from demur.engine.frozen import FrozenModel, pad_batch
from demur.engine.fused_resnet import compiler_for_attacks
from demur.engine.plan import ENGINES, EnginePlan, check_engine, choose_plan
from demur.engine.steps import PlainSteps
from demur.engine.train_state import Tensors, TrainState
from demur.engine.validation import Validator

__all__ = [
    "ENGINES", "EnginePlan", "FastSteps", "FrozenModel", "PlainSteps", "Tensors", "TrainState",
    "Validator", "check_engine", "choose_plan", "compiler_for_attacks", "pad_batch",
]  # fmt: skip
