"""Random restarts of an attack, with the best result kept for each image."""

from collections.abc import Callable

import torch
from torch import Tensor

from demur import noise
from demur.attacks.batch import AttackBatch
from demur.noise import Stream

# (batch, stream) -> adversarial examples, their objective values (N), verified success (N, bool)
Restart = Callable[[AttackBatch, Stream], tuple[Tensor, Tensor, Tensor]]


def best_of_restarts(
    batch: AttackBatch, to_attack: Tensor, restarts: int, stream: Stream, restart: Restart
) -> Tensor:
    """Return the successful example of each image, else the one with the largest objective.

    Args:
        batch: The images under attack.
        to_attack: Which images to attack, N, bool; the others are returned unchanged.
        restarts: The number of restarts. An image leaves after its first success.
        stream: The stream of random numbers; each restart derives its own.
        restart: The function that runs one restart.
    """
    best, best_value = batch.x.clone(), torch.full_like(batch.y, -torch.inf, dtype=batch.x.dtype)
    for number in range(restarts):
        rows = to_attack.nonzero()[:, 0]
        if len(rows) == 0:
            break
        x_adv, value, success = restart(batch.select(rows), noise.derive_seed(stream, number))
        better = success | (value > best_value[rows])
        best[rows[better]], best_value[rows[better]] = x_adv[better], value[better]
        to_attack = to_attack.index_put((rows[success],), torch.zeros_like(to_attack[:1]))
    return best
