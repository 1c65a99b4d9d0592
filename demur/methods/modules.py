"""The modules that heads put beside the classifier: from pooled stages to raw outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from demur.nets.norm import Norm1d


class NoAux(nn.Module):
    """An auxiliary output of width 0."""

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Nothing, one row per image."""
        return stages[-1][:, :0]


class DenseAux(nn.Module):
    """The paper's A before its sigmoid: two layers on the last feature.

    `apart`: what it learns does not reach the net. An attack on the trained net still sees its
    gradient, which is stopped in train mode only.
    """

    def __init__(self, dim: int, detach_features: bool = False) -> None:
        super().__init__()
        self.detach_features = detach_features
        self.layers = _two_layers(dim, dim // 2)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """The logit of A."""
        logit: Tensor = self.layers(_let_through(stages[-1], self))  # N, 1
        return logit


class BlocksAux(nn.Module):
    """A on the pooled features of all stages side by side."""

    needs_all_stages = True

    def __init__(self, dims: Sequence[int], detach_features: bool = False) -> None:
        super().__init__()
        self.detach_features = detach_features
        self.layers = _two_layers(sum(dims), dims[-1] // 2)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """The logit of A."""
        logit: Tensor = self.layers(_let_through(torch.cat(stages, 1), self))  # N, 1
        return logit


def _two_layers(dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, hidden), Norm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1))


def _let_through(feature: Tensor, aux: DenseAux | BlocksAux) -> Tensor:
    """The feature, without its history while the head learns apart."""
    return feature.detach() if aux.detach_features and aux.training else feature


class SelectiveAux(nn.Module):
    """Whether to answer, in two layers, and a second classifier, in one."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.select = DenseAux(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """The logit of answering, then the logits of the second classifier."""
        return torch.cat([self.select(stages), self.classify(stages[-1])], 1)  # N, 1 + C
