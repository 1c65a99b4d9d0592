"""The steps of an epoch: the plain engine, which is the reference for every other.

steps = PlainSteps(recipe, learner, fit)
steps.begin(epoch)
for i in range(steps.batches): steps(i)
steps.losses            # one a step, on the device; read once an epoch

Under torchrun each process takes its part of every batch; the losses of all add up to the mean.
"""

import torch

from demur import noise
from demur.data import Images
from demur.engine.train_state import TrainState
from demur.engine.training_step import TrainingStep
from demur.recipes import Recipe

ORDER = 1  # a purpose of random numbers


class PlainSteps:
    """One eager step after another."""

    def __init__(self, recipe: Recipe, train_state: TrainState, fit: Images) -> None:
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.batches = -(-len(fit) // recipe.batch_size)
        device = fit.y.device
        self.order = torch.zeros(len(fit), dtype=torch.int64, device=device)
        self.rates = torch.zeros(self.batches)
        self.losses = torch.zeros(self.batches, dtype=train_state.dtype, device=device)
        self.first = 0  # step of the whole run that opens the epoch
        self.update = TrainingStep(recipe, train_state, fit)

    def begin(self, epoch: int) -> None:
        """Draw the order of an epoch and its learning rates."""
        seed = noise.derived(self.recipe.seed, ORDER)
        self.order.copy_(noise.permutation(seed, len(self.fit), epoch))
        self.first = epoch * self.batches
        total = self.recipe.epochs * self.batches
        steps = range(self.first + 1, self.first + self.batches + 1)
        self.rates = torch.tensor([self.recipe.schedule(step / total) for step in steps])
        self.train_state.begin(epoch / self.recipe.epochs)

    def __call__(self, i: int) -> None:
        """Take step i of the epoch."""
        size = self.recipe.batch_size
        self.train_state.set_learning_rate(float(self.rates[i]))
        batch = self.order[i * size : (i + 1) * size]
        chosen = self.train_state.world.shard(batch)
        self.losses[i] = self.update(chosen, self.first + i, len(chosen) / len(batch))
