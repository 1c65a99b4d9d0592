"""The small nets of the zoo and their training on digits; every training has a seed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demur import PGD, Digits, Linf

EPS = 0.1
EPOCHS, BATCH = 30, 115
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two layers from 8x8 pixels to ten logits; `activation` is of the hidden layer."""

    def __init__(self, activation: nn.Module | None = None, width: int = 64) -> None:
        super().__init__()
        self.hidden, self.classify = nn.Linear(64, width), nn.Linear(width, 10)
        self.activation = activation or nn.ReLU()

    def feature(self, x: Tensor) -> Tensor:
        """Return the hidden layer, N, width."""
        return self.activation(self.hidden(x.flatten(1)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.feature(x))  # type: ignore[no-any-return]


def fit_images() -> tuple[Tensor, Tensor]:
    """Return the training images and labels."""
    return Digits().load()["fit"].batch(slice(None))


def train(
    make: Callable[[], nn.Module],
    seed: int = 0,
    loss: Loss = cross_entropy,
    adversarial: bool = False,
    images: tuple[Tensor, Tensor] | None = None,
) -> nn.Module:
    """Return a trained net in eval mode; `adversarial` trains on PGD images (Madry et al. 2018)."""
    x, y = images or fit_images()
    attack = PGD(Linf(EPS), steps=7)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        net = make()
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(y)).split(BATCH):
                pixels = attack.perturb(net, x[rows], y[rows], rows) if adversarial else x[rows]
                optimiser.zero_grad()
                loss(net(pixels), y[rows]).backward()
                optimiser.step()
    return net.eval()
