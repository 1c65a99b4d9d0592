"""The engine, an optional box: faster gradient queries and training losses on a GPU.

Attacks reach it through `AttackModel`; `FastSteps` of `demur.training` captures a training step
with it. Results are those of the plain net up to rounding.
"""

from demur.engine.any_module import FrozenModule, accelerated, attack, check_model_engine
from demur.engine.copies import Compiler, compile_function
from demur.engine.frozen import FrozenModel
from demur.engine.fused_resnet import FusedTrainingNet, compiler_for_attacks, fused_supported
from demur.engine.graphs import capture, cudnn_benchmark, pad_batch
from demur.engine.plan import ENGINES, EnginePlan, check_engine, choose_plan

__all__ = [
    "ENGINES", "Compiler", "EnginePlan", "FrozenModel", "FrozenModule", "FusedTrainingNet",
    "accelerated", "attack", "capture", "check_engine", "check_model_engine", "choose_plan",
    "compile_function", "compiler_for_attacks", "cudnn_benchmark", "fused_supported", "pad_batch",
]  # fmt: skip
