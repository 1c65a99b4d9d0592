"""One training step of a recipe: augment, attack, compute the loss, update the weights.

The loss is that of the method (`methods/method.py`); with the RR head it contains Eq. 7.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from demur import noise
from demur.data import BatchStream, Images, MappedImages
from demur.methods import Method
from demur.noise import Stream
from demur.numerics import autocast, tf32
from demur.recipes import Recipe
from demur.training.state import TrainState

ORDER, AUGMENT, CRAFT = 1, 2, 3  # random streams of batch order, augmentation and attack


class TrainingStep:
    """Update a TrainState by one step and return the loss.

    The noise depends only on (seed, image, step), so every engine draws the same. Attacks query
    `model`, by default the net itself; `batch_loss` is a faster version of the method's own.
    """

    def __init__(
        self, recipe: Recipe, train_state: TrainState, fit: Images, model: nn.Module | None = None,
        batch_loss: Callable[..., Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.method: Method | None = recipe.method
        self.model = model or train_state.net
        self.batch_loss = batch_loss or recipe.method.batch_loss
        images = len(fit) * recipe.passes(len(fit))
        self.total_steps = recipe.epochs * -(-images // recipe.batch_size)

    def __call__(self, chosen: Tensor, step: Stream, share: float = 1.0) -> Tensor:
        """Train on the chosen images; return their mean loss times `share`.

        `share` is the fraction of the whole batch in this process, so that losses and gradients
        sum over processes to those of the whole batch.
        """
        recipe, train_state = self.recipe, self.train_state
        x, y = self.fit.batch(chosen)
        index = self.fit.index[chosen]
        x = recipe.augment(
            x.to(train_state.dtype), noise.derive_seed(recipe.seed, AUGMENT), index, step
        )
        stream = noise.derive_seed(recipe.seed, CRAFT, step)
        with tf32(train_state.precision):
            with autocast(train_state.precision, x.device):
                x_adv = self.method.craft(self.model, x, y, index, stream) if self.method else x

            head_only_mask = recipe.method.head_only_mask(index)
            target = self._soft_labels(x, y, step)

            def loss() -> Tensor:
                with autocast(train_state.precision, x.device):
                    return share * self.batch_loss(
                        train_state.net, x, x_adv, y, head_only_mask, target
                    )

            return self._update_weights(loss)

    @torch.no_grad()
    def _soft_labels(self, x: Tensor, y: Tensor, step: Stream) -> Tensor | None:
        """Return the target probabilities of soft labels, N, K; None for hard labels."""
        recipe, train_state = self.recipe, self.train_state
        teacher = None
        if recipe.labels.needs_teacher and train_state.ema is not None:
            with autocast(train_state.precision, x.device):
                teacher = train_state.ema.net(x)
        progress = step / self.total_steps
        return recipe.labels.targets(y, recipe.data.domain.classes, progress, teacher)

    def _update_weights(self, loss: Callable[[], Tensor]) -> Tensor:
        """Take one optimiser step on the gradient over all processes; return the loss.

        AWP evaluates the loss twice; the second value, at the perturbed weights, is returned.
        """
        awp, ema = self.train_state.awp, self.train_state.ema
        if awp is None:
            value = self._backward(loss)
        else:
            with awp.preserve_statistics():
                self._backward(loss)
            with awp.perturb():
                value = self._backward(loss)
        self.train_state.optimiser.step()
        if ema is not None:
            ema.update()
        return value

    def _backward(self, loss: Callable[[], Tensor]) -> Tensor:
        train_state, value = self.train_state, loss()
        train_state.optimiser.zero_grad()
        value.backward(inputs=list(train_state.trainable.values()))
        grads = [p.grad for p in train_state.net.parameters() if p.grad is not None]
        train_state.world.all_reduce(grads)
        return value.detach()


class PlainSteps:
    """The training steps of an epoch; eager, the reference for `FastSteps`.

    Under torchrun each rank trains on its shard of every batch, and `losses` holds its shares of
    the losses of an epoch's steps: all-reduce them to get the means of the batches.
    """

    def __init__(self, recipe: Recipe, train_state: TrainState, fit: Images) -> None:
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.passes = recipe.passes(len(fit))
        self.batches = -(-len(fit) * self.passes // recipe.batch_size)
        device = fit.y.device
        self.order = torch.zeros(len(fit) * self.passes, dtype=torch.int64, device=device)
        self.rates = torch.zeros(self.batches)
        self.losses = torch.zeros(self.batches, dtype=train_state.dtype, device=device)
        self.first_step = 0  # steps of the run before this epoch
        self.plain_step = TrainingStep(recipe, train_state, fit)
        # images that do not fit on the device come from worker processes, batch by batch
        self.stream = BatchStream(fit) if isinstance(fit, MappedImages) else None

    def begin(self, epoch: int) -> None:
        """Draw the batch order of an epoch and set its learning rates."""
        seed = noise.derive_seed(self.recipe.seed, ORDER)
        orders = range(epoch * self.passes, (epoch + 1) * self.passes)
        self.order.copy_(torch.cat([noise.permutation(seed, len(self.fit), k) for k in orders]))
        self.strength, method = self.recipe.strength(epoch), self.recipe.method
        self.plain_step.method = method.scaled(self.strength) if self.strength else None
        self.first_step = epoch * self.batches
        total = self.recipe.epochs * self.batches
        steps = range(self.first_step + 1, self.first_step + self.batches + 1)
        self.rates = torch.tensor([self.recipe.schedule(step / total) for step in steps])
        self.train_state.begin(epoch / self.recipe.epochs)
        if self.stream is not None:
            self.stream.begin([self._shard(i)[0] for i in range(self.batches)])

    def __call__(self, i: int) -> None:
        self.train_state.set_learning_rate(float(self.rates[i]))
        shard, share = self._shard(i)
        if self.stream is not None:
            self.plain_step.fit = self.stream.next()
            shard = torch.arange(len(shard), device=shard.device)
        self.losses[i] = self.plain_step(shard, self.first_step + i, share)

    def _shard(self, i: int) -> tuple[Tensor, float]:
        """Positions of this rank's images of batch i, and their share of the batch."""
        size = self.recipe.batch_size
        batch = self.order[i * size : (i + 1) * size]
        shard = self.train_state.world.shard(batch)
        return shard, len(shard) / len(batch)
