"""Randomised nets on the digits, in plain PyTorch, and the queries that an attack makes of them.

net = randomised_nets()["plain, input noise .25"]()       # trains it first
counted = Counted(net)                                    # counted.images after an attack
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, interpolate, pad, relu

from demur import PGD, Digits, Linf, Output

EPS = 0.15
Transform = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two convolutions and two dense layers; noise in the hidden layer, and dropout."""

    def __init__(self, hidden_noise: float = 0.0, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, 1, 1), nn.Conv2d(16, 24, 3, 2, 1)
        self.hidden, self.last = nn.Linear(384, 64), nn.Linear(64, 10)
        self.hidden_noise, self.drop = hidden_noise, drop

    def forward(self, x: Tensor) -> Tensor:
        z = relu(self.hidden(relu(self.second(relu(self.first(x)))).flatten(1)))
        if self.hidden_noise:
            z = z + self.hidden_noise * torch.randn_like(z)
        logits: Tensor = self.last(dropout(z, self.drop))
        return logits


class Randomised(nn.Module):
    """Nets behind a random transformation of the images; one net is drawn per call."""

    def __init__(self, transform: Transform, *nets: nn.Module) -> None:
        super().__init__()
        self.transform, self.nets = transform, nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        drawn = int(torch.randint(len(self.nets), ()))
        logits: Tensor = self.nets[drawn](self.transform(x))
        return logits


def input_noise(size: float) -> Transform:
    """Gaussian noise of this standard deviation."""
    return lambda x: x + size * torch.randn_like(x)


def resize_and_pad(x: Tensor) -> Tensor:
    """Resize the batch to a random size from 8 to 11, pad to 11 at a random place, resize back."""
    size = int(torch.randint(8, 12, ()))
    left, top = (int(torch.randint(0, 12 - size, ())) for _ in range(2))
    x = interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    x = pad(x, (left, 11 - size - left, top, 11 - size - top))
    return interpolate(x, size=(8, 8), mode="bilinear", align_corners=False)


def random_crop(x: Tensor) -> Tensor:
    """Shift each image by up to one pixel in each direction."""
    shift = torch.randint(0, 3, (2, len(x), 1))
    rows, columns = (torch.arange(8) + part for part in shift)
    image = torch.arange(len(x))[:, None, None]
    padded = pad(x, (1, 1, 1, 1))[:, 0]
    return padded[image, rows[:, :, None], columns[:, None, :]][:, None]


def identity(x: Tensor) -> Tensor:
    """Return the images."""
    return x


@cache
def trained(robust: bool, seed: int, transform: Transform, steps: int = 400) -> Net:
    """Return a net after plain or PGD-5 training, behind a random transformation of the images."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        net = Net()
        behind = Randomised(transform, net)
        x, y = Digits().load()["fit"].batch(slice(None))
        optimiser = torch.optim.Adam(net.parameters(), 0.005)
        attack = PGD(Linf(EPS), steps=5, step_size=EPS / 3)
        for step in range(steps):
            rows = torch.arange(64 * step, 64 * (step + 1)) % len(x)
            images = x[rows]
            if robust:
                images = attack.perturb(behind, images, y[rows], rows, stream=step)
            optimiser.zero_grad()
            cross_entropy(behind(images), y[rows]).backward()
            optimiser.step()
    return net


def net_of(
    robust: bool, seed: int = 0, transform: Transform = identity,
    hidden_noise: float = 0.0, drop: float = 0.0,
) -> Net:  # fmt: skip
    """Return a trained net in eval mode; its noise and dropout stay active."""
    net = Net(hidden_noise, drop)
    net.load_state_dict(trained(robust, seed, transform).state_dict())
    return net.eval().requires_grad_(False)


def randomised_nets() -> dict[str, Callable[[], nn.Module]]:
    """Return the classifiers of the comparison by name; a net is trained when it is called."""
    return {
        "plain, input noise .25": lambda: Randomised(input_noise(0.25), net_of(False)),
        "robust, input noise .05": lambda: Randomised(input_noise(0.05), net_of(True)),
        "robust, input noise .25": lambda: Randomised(input_noise(0.25), net_of(True)),
        "robust, hidden noise 1": lambda: net_of(True, hidden_noise=1.0),
        "plain, dropout .5": lambda: net_of(False, drop=0.5),
        "robust, dropout .5": lambda: net_of(True, drop=0.5),
        "robust, resize and pad": lambda: Randomised(
            resize_and_pad, net_of(True, transform=resize_and_pad)
        ),
        "robust, random crop": lambda: Randomised(random_crop, net_of(True, transform=random_crop)),
        "three nets, one drawn": lambda: Randomised(
            identity, *(net_of(seed == 2, seed) for seed in range(3))
        ),
    }


class RandomThreshold(nn.Module):
    """A net whose score, its confidence minus a random number, is accepted from 0."""

    def __init__(self, net: nn.Module, low: float, high: float) -> None:
        super().__init__()
        self.net, self.low, self.high = net, low, high

    def forward(self, x: Tensor) -> Output:
        logits = self.net(x)
        threshold = self.low + (self.high - self.low) * torch.rand(len(x))
        score = logits.softmax(-1).amax(-1) - threshold
        return Output(logits, logits.new_zeros(len(x), 0), score[:, None])


def rejecting_nets() -> dict[str, tuple[Callable[[], nn.Module], str, float]]:
    """Return nets that reject, by name: a function that makes one, its score and threshold."""
    nets = randomised_nets()
    return {
        "rejector: plain, input noise .25": (nets["plain, input noise .25"], "con", 0.7),
        "rejector: robust, input noise .05": (nets["robust, input noise .05"], "con", 0.7),
        "rejector: robust, random threshold": (
            lambda: RandomThreshold(net_of(True), 0.5, 0.9), "model", 0.0,
        ),
    }  # fmt: skip


class Counted(nn.Module):
    """A net that counts the images it is given."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.images = net, 0

    def forward(self, x: Tensor) -> Tensor | Output:
        self.images += len(x)
        answer: Tensor | Output = self.net(x)
        return answer
