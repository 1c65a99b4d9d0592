"""Auxiliary modules of the heads: pooled features of the stages to auxiliary outputs (N, A)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from demur.nets.norm import Norm1d


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
