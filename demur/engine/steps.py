"""The plain engine: one eager training step after another, the reference for the fast engine.

    steps = PlainSteps(recipe, train_state, fit)
    steps.begin(epoch)
    for i in range(steps.batches):
        steps(i)            # writes steps.losses[i], on the device; read once per epoch

Under torchrun each rank trains on its shard of every batch.
"""

import torch

from demur import noise
from demur.data import Images
from demur.engine.train_state import TrainState
from demur.engine.training_step import TrainingStep
from demur.recipes import Recipe

ORDER = 1  # random stream of the batch order


class PlainSteps:
    """The training steps of an epoch, run eagerly.

    Attributes:
        batches: steps per epoch; the last batch may be partial.
        losses: loss of each step of the epoch. Each rank holds its share: all-reduce them to get
            the mean losses of the batches.
    """

    def __init__(self, recipe: Recipe, train_state: TrainState, fit: Images) -> None:
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.batches = -(-len(fit) // recipe.batch_size)
        device = fit.y.device
        self.order = torch.zeros(len(fit), dtype=torch.int64, device=device)
        self.rates = torch.zeros(self.batches)
        self.losses = torch.zeros(self.batches, dtype=train_state.dtype, device=device)
        self.first_step = 0  # steps of the run before this epoch
        self.plain_step = TrainingStep(recipe, train_state, fit)

    def begin(self, epoch: int) -> None:
        """Draw the batch order of an epoch and set its learning rates."""
        seed = noise.derive_seed(self.recipe.seed, ORDER)
        self.order.copy_(noise.permutation(seed, len(self.fit), epoch))
        self.first_step = epoch * self.batches
        total = self.recipe.epochs * self.batches
        steps = range(self.first_step + 1, self.first_step + self.batches + 1)
        self.rates = torch.tensor([self.recipe.schedule(step / total) for step in steps])
        self.train_state.begin(epoch / self.recipe.epochs)

    def __call__(self, i: int) -> None:
        """Take step i of the epoch."""
        size = self.recipe.batch_size
        self.train_state.set_learning_rate(float(self.rates[i]))
        batch = self.order[i * size : (i + 1) * size]
        shard = self.train_state.world.shard(batch)
        self.losses[i] = self.plain_step(shard, self.first_step + i, len(shard) / len(batch))
