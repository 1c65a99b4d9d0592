"""The modules that heads put beside the classifier: from pooled stages to raw outputs."""

import torch
from torch import Tensor, nn

from demur.nets.norm import Norm1d


class NoAux(nn.Module):
    """An auxiliary output of width 0."""

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Nothing, one row per image."""
        return stages[-1][:, :0]


class DenseAux(nn.Module):
    """The paper's A before its sigmoid: two layers on the last feature."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.layers = nn.Sequential(
            nn.Linear(dim, half), Norm1d(half), nn.ReLU(), nn.Linear(half, 1)
        )

    def forward(self, stages: list[Tensor]) -> Tensor:
        """The logit of A."""
        logit: Tensor = self.layers(stages[-1])  # N, 1
        return logit


class SelectiveAux(nn.Module):
    """Whether to answer, in two layers, and a second classifier, in one."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.select = DenseAux(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """The logit of answering, then the logits of the second classifier."""
        return torch.cat([self.select(stages), self.classify(stages[-1])], 1)  # N, 1 + C
