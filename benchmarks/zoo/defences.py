"""The defences, each written from its published description and reduced to its idea.

A defence is a model, perhaps with a detector (higher scores mean accept). All but the last fell to
a stronger attack: Athalye et al. 2018, Carlini and Wagner 2017, Tramer et al. 2020, Croce and
Hein 2020.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cosine_similarity, cross_entropy, one_hot, pad

from zoo.nets import Net, fit_images, train

Detector = Callable[[Tensor], Tensor]


class Defence(NamedTuple):
    """A defended model, its detector if it has one, and the naive evaluation of its claim."""

    model: Callable[[Tensor], Tensor]
    detector: Detector | None = None
    attacked: Callable[[Tensor], Tensor] | None = None  # by the naive attack; None is the model
    steps: int = 20  # of PGD in the naive attack
    version: str = ""  # of the audit, where the version of all others does not suit


class Scaled(nn.Module):
    """A net whose logits are multiplied, so that the softmax saturates."""

    def __init__(self, net: nn.Module, factor: float) -> None:
        super().__init__()
        self.net, self.factor = net, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.net(x)  # type: ignore[no-any-return]


class Before(nn.Module):
    """A net behind a transformation of its input."""

    def __init__(self, transform: Callable[[Tensor], Tensor], net: nn.Module) -> None:
        super().__init__()
        self.transform, self.net = transform, net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.transform(x))  # type: ignore[no-any-return]


class Jumps(nn.Module):
    """A ReLU with jumps: its value is rounded, so its gradient is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.floor(4 * x.relu()) / 4


def no_defence() -> Defence:
    """The net of most defences, without any."""
    return Defence(train(Net))


def saturation() -> Defence:
    """Logits so large that the gradient of the cross-entropy is zero in fp32."""
    return Defence(Scaled(train(Net), 1e3).eval())


def blur() -> Defence:
    """A blur of 3x3 pixels before the net (feature squeezing, Xu et al. 2018)."""
    model = train(lambda: Before(lambda x: avg_pool2d(x, 3, 1, 1), Net()))
    assert isinstance(model, Before)
    return Defence(model, attacked=model.net)  # the claim is against an attacker without the blur


def discretisation() -> Defence:
    """Pixels rounded to four levels (thermometer encoding, Buckman et al. 2018)."""
    return Defence(train(lambda: Before(lambda x: (3 * x).round() / 3, Net())))


def jump_activations() -> Defence:
    """Activations with jumps, put into a trained net (as k-WTA, Xiao et al. 2020)."""
    net = train(Net)
    net.activation = Jumps()
    return Defence(net)


def label_smoothing() -> Defence:
    """Training with smooth labels (Shafahi et al. 2019), claimed against one step."""
    smooth = partial(cross_entropy, label_smoothing=0.6)
    return Defence(train(Net, loss=smooth), steps=1)


def high_temperature() -> Defence:
    """Defensive distillation: trained at temperature 100, used at 1 (Papernot et al. 2016)."""
    return Defence(train(Net, loss=lambda out, y: cross_entropy(out / 100, y)))


def random_transformations() -> Defence:
    """A random shift by one pixel and noise before the net (Xie et al. 2018)."""

    def shifted(x: Tensor) -> Tensor:
        dy, dx = (int(k) for k in torch.randint(3, (2,)))
        moved = pad(x, (1, 1, 1, 1))[:, :, dy : dy + 8, dx : dx + 8]
        return moved + 0.1 * torch.randn_like(x)

    return Defence(train(lambda: Before(shifted, Net())), version="rand")


def random_neurons() -> Defence:
    """Hidden units dropped at random, also at test time (Dhillon et al. 2018)."""

    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x.relu(), 0.5, training=True)

    return Defence(train(lambda: Net(Dropped())), version="rand")


def majority_vote() -> Defence:
    """The votes of five nets: a count of labels, without a gradient."""
    nets = [train(Net, seed) for seed in range(5)]

    def votes(x: Tensor) -> Tensor:
        return torch.stack([one_hot(net(x).argmax(1), 10).float() for net in nets]).mean(0)

    return Defence(votes)


def one_vs_rest() -> Defence:
    """Ten saturating detectors of one class each; no or two answers reject (Verma, Swami 2019)."""

    def binary(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(out, one_hot(y, 10).float())

    net = train(Net, loss=binary)

    def model(x: Tensor) -> Tensor:
        return 10 * torch.sigmoid(5 * net(x))

    def detector(x: Tensor) -> Tensor:
        top: Tensor = model(x).topk(2).values
        return torch.minimum(top[:, 0] - 5, 5 - top[:, 1])  # one class above, all others below

    return Defence(model, detector)


def nearest_neighbours() -> Defence:
    """Reject unless the nearest features agree with the label (Papernot and McDaniel 2018)."""
    net, (x, y) = train(Net), fit_images()
    assert isinstance(net, Net)
    bank = net.feature(x).detach()

    def detector(images: Tensor) -> Tensor:
        near = torch.cdist(net.feature(images), bank).topk(15, largest=False).indices
        label: Tensor = net(images).argmax(1)
        return (y[near] == label[:, None]).float().mean(1)

    return Defence(net, detector)


def fingerprint() -> Defence:
    """A trapdoor in training, and its trace in the features as detector (Shan et al. 2020)."""
    x, y = fit_images()
    marked = x.clone()
    marked[:, :, :2, :2] = 1.0
    target = torch.arange(len(y)) % 10
    net = train(Net, images=(torch.cat([x, marked]), torch.cat([y, target])))
    assert isinstance(net, Net)
    trace = net.feature(marked).detach().mean(0, keepdim=True)
    return Defence(net, lambda images: -cosine_similarity(net.feature(images), trace))


def stable_prediction() -> Defence:
    """Reject a label that noise changes (Hu et al. 2019, Roth et al. 2019)."""
    net = train(Net)
    noise = 0.15 * torch.randn(16, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def detector(x: Tensor) -> Tensor:
        label = net(x).argmax(1)
        return torch.stack([net(x + part).argmax(1) == label for part in noise]).float().mean(0)

    return Defence(net, detector)


def step_detector() -> Defence:
    """A detector whose score has steps: the energy, rounded."""
    net = train(Net)
    return Defence(net, lambda x: (net(x).logsumexp(1) / 4).round())


def pgd_at(seed: int = 0) -> Defence:
    """Adversarial training, which is not broken: nothing may be flagged."""
    return Defence(train(Net, seed, adversarial=True))


BROKEN: dict[str, Callable[[], Defence]] = {
    "saturation": saturation,
    "blur": blur,
    "discretisation": discretisation,
    "jump activations": jump_activations,
    "label smoothing": label_smoothing,
    "high temperature": high_temperature,
    "random transformations": random_transformations,
    "random neurons": random_neurons,
    "majority vote": majority_vote,
    "one-vs-rest with reject": one_vs_rest,
    "nearest neighbours": nearest_neighbours,
    "backdoor fingerprint": fingerprint,
    "stable prediction": stable_prediction,
    "detector with steps": step_detector,
}
SOUND: dict[str, Callable[[], Defence]] = {
    f"PGD-AT (seed {seed})": partial(pgd_at, seed) for seed in range(3)
}
