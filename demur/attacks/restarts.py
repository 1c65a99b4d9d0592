"""The best of several tries at each image."""

from collections.abc import Callable

import torch
from torch import Tensor

from demur import noise
from demur.attacks.batch import AttackBatch
from demur.noise import Stream

# of victims and a stream: the images to keep, what they are worth, and which are broken
Try = Callable[[AttackBatch, Stream], tuple[Tensor, Tensor, Tensor]]


def best_of_restarts(
    batch: AttackBatch, whole: Tensor, restarts: int, stream: Stream, attempt: Try
) -> Tensor:
    """Broken images where a try found them, else the most valuable; what is not whole stays."""
    best, best_value = batch.x.clone(), torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
    for restart in range(restarts):
        alive = whole.nonzero()[:, 0]
        if len(alive) == 0:
            break
        found, value, broken = attempt(batch.select(alive), noise.derived(stream, restart))
        better = broken | (value > best_value[alive])
        best[alive[better]], best_value[alive[better]] = found[better], value[better]
        whole = whole.index_put((alive[broken],), torch.zeros_like(whole[:1]))
    return best
