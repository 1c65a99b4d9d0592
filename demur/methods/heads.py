"""What a head is: the second output of the net, what it learns, and the score it is for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from demur.methods.frames import Frame
from demur.methods.modules import NoAux
from demur.methods.views import Views
from demur.rejectors import Rejector
from demur.spec import Spec


@dataclass(frozen=True)
class Head(Spec, ABC):
    """The auxiliary module, its loss, and how images are crafted for it."""

    @abstractmethod
    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module from the list of pooled stages to (N, A)."""

    @abstractmethod
    def term(self, views: Views) -> Tensor | None:
        """The weighted loss of each attacked image; None where there is nothing to learn."""

    def loss(self, each: Tensor, views: Views) -> Tensor:
        """The mean loss of a batch whose images cost the classifier `each`."""
        extra = self.term(views)
        if extra is None:
            return each.mean()
        same_images = each.shape == extra.shape
        return (each + extra).mean() if same_images else each.mean() + extra.mean()

    def rejectors(self) -> dict[str, Rejector]:
        """The rejectors that this head is for, by name, its own score first."""
        return {}

    def framed(self, frame: Frame) -> Frame:
        """The frame as it is used with this head; BadInput where they do not go together."""
        return frame

    @property
    def sees_clean(self) -> bool:
        """Whether its loss looks at the images as they are."""
        return False

    @property
    def by_image(self) -> bool:
        """Whether its loss is a mean over images, each by itself."""
        return True

    @property
    def differentiates(self) -> bool:
        """Whether its loss holds a gradient with respect to the clean images."""
        return False


@dataclass(frozen=True)
class Plain(Head):
    """No second output."""

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """A module of width 0."""
        return NoAux()

    def term(self, views: Views) -> None:
        """Nothing to learn."""
