"""What a head is: the second output of the net, what it learns, and the score it is for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from demur.methods.frameworks import Framework
from demur.methods.modules import NoAux
from demur.methods.outputs import BatchOutputs
from demur.rejectors import Rejector
from demur.spec import Spec


@dataclass(frozen=True)
class Head(Spec, ABC):
    """The auxiliary module, its loss, and how images are crafted for it."""

    @abstractmethod
    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module from the list of pooled stages to (N, A)."""

    @abstractmethod
    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor | None:
        """The weighted loss of each attacked image; None where there is nothing to learn."""

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        """The mean loss of a batch whose images cost the classifier `each`."""
        extra = self.auxiliary_loss(outputs)
        if extra is None:
            return loss_per_image.mean()
        same_images = loss_per_image.shape == extra.shape
        return (
            (loss_per_image + extra).mean() if same_images else loss_per_image.mean() + extra.mean()
        )

    def rejectors(self) -> dict[str, Rejector]:
        """The rejectors that this head is for, by name, its own score first."""
        return {}

    def adapt_framework(self, framework: Framework) -> Framework:
        """The frame as it is used with this head; BadInput where they do not go together."""
        return framework

    @property
    def needs_clean(self) -> bool:
        """Whether its loss looks at the images as they are."""
        return False

    @property
    def is_mean_over_images(self) -> bool:
        """Whether its loss is a mean over images, each by itself."""
        return True

    @property
    def needs_input_gradient(self) -> bool:
        """Whether its loss holds a gradient with respect to the clean images."""
        return False


@dataclass(frozen=True)
class NoHead(Head):
    """No second output."""

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module of width 0."""
        return NoAux()

    def auxiliary_loss(self, outputs: BatchOutputs) -> None:
        """Nothing to learn."""
