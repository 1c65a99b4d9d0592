"""Training: the loop over epochs, the training step, its state, validation.

The plain path is `loop.py` and `step.py`. `FastSteps` captures the same step as a CUDA graph.
"""

from demur.training.loop import Progress, Training, Validator, base_of, check_trainable, train
from demur.training.state import TrainState
from demur.training.step import FastSteps, PlainSteps

__all__ = [
    "FastSteps", "PlainSteps", "Progress", "TrainState", "Training", "Validator", "base_of",
    "check_trainable", "train",
]  # fmt: skip
