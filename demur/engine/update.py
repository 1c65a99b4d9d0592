"""One training step, as the recipe says it: augment, craft, teach, and change the weights.

The plain engine calls it as it stands; the fast one gives it a crafter and a compiled loss and
records it once. Both draw the same noise, since that depends on (seed, image, step) alone.
"""

from collections.abc import Callable

from torch import Tensor, nn

from demur import noise
from demur.data import Images
from demur.engine.learner import Learner
from demur.noise import Stream
from demur.precision import lowered, rounded
from demur.recipes import Recipe

AUGMENT, CRAFT = 2, 3  # purposes of random numbers


class Update:
    """update(chosen, step) changes the learner by one step and returns the loss."""

    def __init__(
        self,
        recipe: Recipe,
        learner: Learner,
        fit: Images,
        model: nn.Module | None = None,
        taught: Callable[..., Tensor] | None = None,
    ) -> None:
        self.recipe, self.learner, self.fit = recipe, learner, fit
        self.model = model or learner.net  # what the attack looks at
        self.taught = taught or recipe.method.taught

    def __call__(self, chosen: Tensor, step: Stream, share: float = 1.0) -> Tensor:
        """The mean loss of the chosen images, times their share of the batch of all processes."""
        recipe, learner = self.recipe, self.learner
        x, y = self.fit.batch(chosen)
        index = self.fit.index[chosen]
        x = recipe.augment(x.to(learner.dtype), noise.derived(recipe.seed, AUGMENT), index, step)
        stream = noise.derived(recipe.seed, CRAFT, step)
        with rounded(learner.precision):
            with lowered(learner.precision, x.device):
                x_adv = recipe.method.crafted(self.model, x, y, index, stream)

            spared = recipe.method.spared(index)

            def loss() -> Tensor:
                with lowered(learner.precision, x.device):
                    return share * self.taught(learner.net, x, x_adv, y, spared)

            return learner.learn_from(loss)
