"""One training step of a recipe: augment, attack, compute the loss, update the weights.

The plain engine calls it eagerly. The fast engine passes a FrozenModel and a compiled loss and
captures it as a CUDA graph. Both draw the same noise, which depends only on (seed, image, step).
"""

from collections.abc import Callable

from torch import Tensor, nn

from demur import noise
from demur.data import Images
from demur.engine.train_state import TrainState
from demur.noise import Stream
from demur.precision import autocast, tf32
from demur.recipes import Recipe

AUGMENT, CRAFT = 2, 3  # random streams of augmentation and attack


class TrainingStep:
    """Update a TrainState by one step and return the loss.

    Args:
        recipe: what to train.
        train_state: the state to update.
        fit: the training images.
        model: the model that attacks query; None: the net itself.
        batch_loss: a faster version of the method's batch loss; None: the method's own.
    """

    def __init__(
        self,
        recipe: Recipe,
        train_state: TrainState,
        fit: Images,
        model: nn.Module | None = None,
        batch_loss: Callable[..., Tensor] | None = None,
    ) -> None:
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.model = model or train_state.net
        self.batch_loss = batch_loss or recipe.method.batch_loss

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
                x_adv = recipe.method.craft(self.model, x, y, index, stream)

            head_only_mask = recipe.method.head_only_mask(index)

            def loss() -> Tensor:
                with autocast(train_state.precision, x.device):
                    return share * self.batch_loss(train_state.net, x, x_adv, y, head_only_mask)

            return train_state.update_weights(loss)
