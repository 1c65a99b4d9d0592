"""One training step, as the recipe says it: augment, craft, teach, and change the weights.

The plain engine calls it as it stands; the fast one gives it a crafter and a compiled loss and
records it once. Both draw the same noise, since that depends on (seed, image, step) alone.
"""

from collections.abc import Callable

from torch import Tensor, nn

from demur import noise
from demur.data import Images
from demur.engine.train_state import TrainState
from demur.noise import Stream
from demur.precision import autocast, tf32
from demur.recipes import Recipe

AUGMENT, CRAFT = 2, 3  # purposes of random numbers


class TrainingStep:
    """update(chosen, step) changes the learner by one step and returns the loss."""

    def __init__(
        self,
        recipe: Recipe,
        train_state: TrainState,
        fit: Images,
        model: nn.Module | None = None,
        batch_loss: Callable[..., Tensor] | None = None,
    ) -> None:
        self.recipe, self.train_state, self.fit = recipe, train_state, fit
        self.model = model or train_state.net  # what the attack looks at
        self.batch_loss = batch_loss or recipe.method.batch_loss

    def __call__(self, chosen: Tensor, step: Stream, share: float = 1.0) -> Tensor:
        """The mean loss of the chosen images, times their share of the batch of all processes."""
        recipe, train_state = self.recipe, self.train_state
        x, y = self.fit.batch(chosen)
        index = self.fit.index[chosen]
        x = recipe.augment(
            x.to(train_state.dtype), noise.derived(recipe.seed, AUGMENT), index, step
        )
        stream = noise.derived(recipe.seed, CRAFT, step)
        with tf32(train_state.precision):
            with autocast(train_state.precision, x.device):
                x_adv = recipe.method.craft(self.model, x, y, index, stream)

            head_only_mask = recipe.method.head_only_mask(index)

            def loss() -> Tensor:
                with autocast(train_state.precision, x.device):
                    return share * self.batch_loss(train_state.net, x, x_adv, y, head_only_mask)

            return train_state.update_weights(loss)
