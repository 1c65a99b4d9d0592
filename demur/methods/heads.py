"""Heads: an auxiliary module beside the classifier, its loss, and the rejector it is trained for.

A head adds a second output to the net and an *auxiliary loss* to the framework's classification
loss. It may also change the objective that training images are attacked with.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from demur.attacks import Objective
from demur.methods.frameworks import BatchOutputs, Framework
from demur.nets.layers import Norm1d
from demur.output import AuxColumn
from demur.rejectors import Rejector
from demur.spec import Spec


@dataclass(frozen=True)
class Head(Spec, ABC):
    """An auxiliary module, its loss, its rejectors, and the changes it makes to a framework.

    Example:
        >>> from dataclasses import dataclass
            >>> from demur import Con, Head, Method, Standard
        >>> from demur.methods.heads import NoAux
        >>> @dataclass(frozen=True)
        ... class Nothing(Head):
        ...     def build(self, dims, classes):
        ...         return NoAux()
        ...
        ...     def auxiliary_loss(self, outputs):
        ...         return None
        >>> method = Method(Standard(), Nothing())
    """

    @property
    def tau(self) -> float:
        """Softmax temperature that the auxiliary output is trained with."""
        return 1.0

    @property
    def columns(self) -> tuple[AuxColumn, ...]:
        """The columns of the auxiliary output, by name; its rejectors read these."""
        return ()

    @property
    def has_weights(self) -> bool:
        """Whether the loss trains weights of the auxiliary module."""
        return bool(self.columns)

    @property
    def has_rectifier(self) -> bool:
        """Whether R-Con = con * A is fitted to T-Con (Eq. 6 and 7)."""
        return False

    @property
    def spares_backbone(self) -> bool:
        """Whether the gradient of the auxiliary loss stops at the features."""
        return False

    def attack_objective(self) -> Objective | None:
        """Return the training loss of A as an objective (the paper's L_RR), or None without A."""
        return None

    @abstractmethod
    def build(self, dims: Sequence[int], classes: int) -> nn.Module:
        """Return the auxiliary module: pooled stage features to auxiliary outputs (N, A).

        Args:
            dims: The widths of the stages.
            classes: The number of classes.
        """

    @abstractmethod
    def auxiliary_loss(self, outputs: BatchOutputs) -> Tensor | None:
        """Return the weighted auxiliary loss of each attacked image (N), or None without one.

        Args:
            outputs: Outputs for the attacked images, and for clean ones if `needs_clean`.
        """

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


# ------------------------------------------------ auxiliary modules: stage features to (N, A)


class NoAux(nn.Module):
    """Auxiliary output of width 0."""

    def forward(self, stages: list[Tensor]) -> Tensor:
        return stages[-1][:, :0]


class DenseAux(nn.Module):
    """Logit of A from two layers on the last feature, as in the paper.

    `detach_features` stops the gradient from the auxiliary loss to the backbone in train mode. In
    eval mode the gradient flows, so that attacks on the trained net can use it.
    """

    def __init__(self, dim: int, detach_features: bool = False) -> None:
        super().__init__()
        self.detach_features = detach_features
        self.layers = _two_layers(dim, dim // 2)

    def forward(self, stages: list[Tensor]) -> Tensor:
        logit: Tensor = self.layers(_detach_in_training(stages[-1], self))  # N, 1
        return logit


class BlocksAux(nn.Module):
    """Logit of A from two layers on the concatenated pooled features of all stages."""

    needs_all_stages = True

    def __init__(self, dims: Sequence[int], detach_features: bool = False) -> None:
        super().__init__()
        self.detach_features = detach_features
        self.layers = _two_layers(sum(dims), dims[-1] // 2)

    def forward(self, stages: list[Tensor]) -> Tensor:
        logit: Tensor = self.layers(_detach_in_training(torch.cat(stages, 1), self))  # N, 1
        return logit


def _two_layers(dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, hidden), Norm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1))


def _detach_in_training(feature: Tensor, aux: DenseAux | BlocksAux) -> Tensor:
    return feature.detach() if aux.detach_features and aux.training else feature


class SelectiveAux(nn.Module):
    """SelectiveNet's selection logit (two layers) and auxiliary class logits (one layer)."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.select = DenseAux(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, stages: list[Tensor]) -> Tensor:
        return torch.cat([self.select(stages), self.classify(stages[-1])], 1)  # N, 1 + C
