"""What a training costs: seconds per epoch from its log, and megabytes of its net.

epoch_seconds(run)      # median of the epochs; None without a log
megabytes(recipe)       # parameters and buffers; nothing is trained or allocated
"""

import json
from functools import cache
from pathlib import Path
from statistics import median

import torch

from demur.errors import BadInput
from demur.recipes import Recipe
from demur.runs import Run

MEGABYTE = 1_000_000


def metrics_file(run: Run) -> Path:
    """The log of a training, one line per epoch."""
    return run.path / "metrics.jsonl"


def epoch_seconds(run: Run) -> float | None:
    """Median seconds per epoch, with validation if the recipe validates; None without a log.

    The first epoch compiles the training step, so it is no part of a mean.

    Raises:
        BadInput: The log was changed, or a line has no seconds.
    """
    if run.metrics_state == "missing":  # raises if the file was changed
        return None
    path = metrics_file(run)
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return float(median(float(line["seconds"]) for line in lines))
    except (ValueError, KeyError, TypeError):  # ValueError: no JSON, or no line
        raise BadInput(f"{path} has no seconds of each epoch; restore it, or delete it") from None


@cache
def megabytes(recipe: Recipe) -> float:
    """Size of the state of the net that a recipe trains, in millions of bytes."""
    with torch.device("meta"):
        net = recipe.net.build(recipe.data.domain, recipe.method.head)
    sizes: list[int] = [one.numel() * one.element_size() for one in net.state_dict().values()]
    return sum(sizes) / MEGABYTE
