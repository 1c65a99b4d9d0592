"""What a training on own images probably reaches and costs, said before it starts.

The table comes from benchmarks/small_data.py: photographs of five classes of CIFAR-10, 32 pixels,
the recipes images-*-small, one seed, 1,000 test images, PGD-10.
"""

import time
from collections.abc import Iterator

import torch

from demur.data import Images
from demur.nets import ResNet8
from demur.recipes import Recipe
from demur.training.state import TrainState
from demur.training.step import TrainingStep

IMAGES = 305  # training images
MEASURED = {  # clean and attacked accuracy in percent, by recipe
    "images-standard-small": (54.2, 41.5),  # attacked at 2/255
    "images-pgdat-rr-small eps=2/255": (53.1, 45.8),
    "images-pgdat-rr-small eps=4/255": (50.1, 38.6),
    "images-pgdat-rr-small eps=8/255": (48.2, 33.8),
}
TIMED = 8  # images of the step whose time is measured


def expectations(recipe: Recipe, fit: Images, device: torch.device) -> Iterator[str]:
    """Yield sentences about accuracy and, on a CPU, time of a training on own images."""
    if isinstance(recipe.net, ResNet8):
        near = IMAGES / 2 <= len(fit) <= 2 * IMAGES
        said = "expect" if near else f"no accuracy is known; {IMAGES} gave"
        figures = [f"{x:.0f}% and {y:.0f}% ({name})" for name, (x, y) in MEASURED.items()]
        yield (
            f"on {len(fit)} training images {said} clean and attacked accuracies of about "
            f"{', '.join(figures)}: measured on {IMAGES} photographs of five classes, chance 20%"
        )
    if device.type == "cpu":
        minutes = max(1, round(_seconds(recipe, fit, device) / 60))
        yield f"training takes about {minutes} min on this machine"


def _seconds(recipe: Recipe, fit: Images, device: torch.device) -> float:
    step, count = TrainingStep(recipe, TrainState(recipe, device), fit.to(device)), TIMED
    chosen = torch.arange(count, device=device) % len(fit)
    step.train_state.begin(0)
    step(chosen, 0)  # warms up
    start = time.monotonic()
    step(chosen, 1)
    attacked = sum(recipe.strength(epoch) > 0 for epoch in range(recipe.epochs))
    images = len(fit) * recipe.passes(len(fit)) * attacked
    return (time.monotonic() - start) * images / count
