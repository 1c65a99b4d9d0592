"""Heads: an auxiliary module beside the classifier, its loss, and the rejector it is trained for.

A head adds a second output to the net and an *auxiliary loss* to the framework's classification
loss. It may also change the objective that training images are attacked with.
"""

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
    """An auxiliary module, its loss, its rejectors, and the changes it makes to a framework."""

    @abstractmethod
    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Create the auxiliary module: pooled stage features of widths `dims` to (N, A)."""

    @abstractmethod
    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor | None:
        """Weighted auxiliary loss of each attacked image (N), or None without one."""

    def loss(self, loss_per_image: Tensor, outputs: BatchOutputs) -> Tensor:
        """Mean training loss of a batch: classification loss plus auxiliary loss.

        `loss_per_image` is the classification loss of each image. CCAT also has one for each clean
        image, so the shapes of both losses may differ.
        """
        auxiliary = self.auxiliary_loss(outputs)
        if auxiliary is None:
            return loss_per_image.mean()
        if loss_per_image.shape == auxiliary.shape:
            return (loss_per_image + auxiliary).mean()
        return loss_per_image.mean() + auxiliary.mean()

    def rejectors(self) -> dict[str, Rejector]:
        """Rejectors that this head is trained for, by name, the main one first."""
        return {}

    def adapt_framework(self, framework: Framework) -> Framework:
        """Framework as used with this head; raises BadInput if they cannot be combined."""
        return framework

    @property
    def needs_clean(self) -> bool:
        """Whether the loss uses the outputs for clean images."""
        return False

    @property
    def is_mean_over_images(self) -> bool:
        """Whether the loss is a mean of terms that depend on one image each."""
        return True

    @property
    def needs_input_gradient(self) -> bool:
        """Whether the loss contains a gradient with respect to the clean images."""
        return False


@dataclass(frozen=True)
class NoHead(Head):
    """No auxiliary output and no auxiliary loss: the loss is the framework's alone.

    Example:
        >>> from demur import PGDAT, Method, NoHead
        >>> method = Method(PGDAT(), NoHead())
    """

    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        return NoAux()

    def auxiliary_loss(self, outputs: BatchOutputs) -> None:
        return None
