"""Linear nets, whose distance to the nearest misclassified point has a closed form."""

import torch
from torch import Tensor, nn

from demur.output import Output

CLASSES, SHAPE = 4, (1, 5, 5)


class LinearNet(nn.Module):
    """A net whose logits and auxiliary logit are linear in the pixels."""

    def __init__(self, seed: int = 0, classes: int = CLASSES) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(classes, 25, generator=g, dtype=torch.float64))
        self.aux = nn.Parameter(torch.randn(1, 25, generator=g, dtype=torch.float64))

    def forward(self, x: Tensor) -> Output:
        flat = x.flatten(1)
        return Output(flat @ self.weight.T, flat, flat @ self.aux.T)


def centred_images(count: int, seed: int = 1) -> Tensor:
    """Return images near mid-grey, so that small balls lie inside the pixel range."""
    g = torch.Generator().manual_seed(seed)
    return 0.5 + 0.2 * (torch.rand(count, *SHAPE, generator=g, dtype=torch.float64) - 0.5)


def distance(net: LinearNet, x: Tensor, y: Tensor, norm: str) -> Tensor:
    """Return the distance of each image to the nearest point where another class ties with y."""
    logits = net(x).logits
    gap = logits.gather(1, y[:, None]) - logits  # N, C
    difference = net.weight[y][:, None] - net.weight[None]  # N, C, 25
    dual = difference.abs().sum(-1) if norm == "Linf" else difference.norm(dim=-1)
    ratio: Tensor = gap / dual.clamp_min(1e-30)
    return ratio.scatter(1, y[:, None], torch.inf).amin(1).detach()


def without_norm(num_classes: int, channels: int, size: int) -> nn.Module:
    """Return a net without batch norm, for a `FactoryNet`."""
    hidden = nn.Linear(channels * size * size, 16)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(16, num_classes))
