"""More models for tests of the audit's grades, off the beaten path; `ALL` has the whole zoo.

    entry = ALL["stored images"]()

They were written after the checks, to see what these say about mechanisms nobody had in mind.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, log_softmax, softmax

from demur.data import Digits
from tests.audit_zoo import (
    EPS,
    ZOO,
    Entry,
    Net,
    Wrapped,
    honest,
    larger,
    plain,
    random,
    robust,
    trained,
    wrapped,
)

# ------------------------------------------------ broken


def gradient_of_another_seed() -> Entry:
    """The answers of one net, the gradients of one that was trained in the same way."""
    other = plain(5)
    return wrapped(lambda net, x: other(x) + (net(x) - other(x)).detach())


def seeded_by_batch_size() -> Entry:
    def answer(net: Any, x: Tensor) -> Tensor:
        noise = torch.randn(x[0].shape, generator=torch.Generator().manual_seed(len(x)))
        return net(x + 0.2 * noise)  # type: ignore[no-any-return]

    return wrapped(answer)


def stored_images() -> Entry:
    """Near an image of the data set the answer hardly moves from that image's answer."""
    stored = torch.cat([one.batch(slice(None))[0] for one in Digits().load().values()])

    def answer(net: Any, x: Tensor) -> Tensor:
        far, nearest = torch.cdist(x.flatten(1), stored.flatten(1), p=torch.inf).min(1)
        own = net(stored[nearest])
        near = (far <= 1.001 * EPS)[:, None]
        return torch.where(near, own + 0.1 * (net(x) - own), net(x))

    return wrapped(answer)


def purified() -> Entry:
    """Three steps towards the pixels of a coarser image; the gradient is that of the last net."""

    def answer(net: Any, x: Tensor) -> Tensor:
        clean = x.detach()
        for _ in range(3):
            smooth = nn.functional.avg_pool2d(clean, 3, 1, 1)
            clean = (clean + 0.3 * (smooth - clean)).mul(6).round() / 6
        return net(x + (clean - x.detach()))  # type: ignore[no-any-return]

    return wrapped(answer)


class Cache(nn.Module):
    """Images that round to the same colours get the answer of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.answers = plain(), dict[bytes, Tensor]()

    def forward(self, x: Tensor) -> Any:
        fresh = self.net(x)
        keys = [row.numpy().tobytes() for row in (4 * x.detach()).round().byte()]
        rows = [self.answers.setdefault(k, a.detach()) for k, a in zip(keys, fresh, strict=True)]
        return torch.stack(rows) + (fresh - fresh.detach())


class Stateful(nn.Module):
    """Whoever asks beside an earlier query gets the answer to that query."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.asked, self.answers = plain(), torch.empty(0, 64), torch.empty(0, 10)

    def forward(self, x: Tensor) -> Any:
        fresh, rows = self.net(x), []
        for image, answer in zip(x.detach().flatten(1), fresh, strict=True):
            far = (self.asked - image).abs().amax(1)
            if len(far) and far.min() < EPS:
                rows.append(self.answers[far.argmin()])
                continue
            rows.append(answer.detach())
            self.asked = torch.cat((self.asked, image[None]))[-2000:]
            self.answers = torch.cat((self.answers, answer.detach()[None]))[-2000:]
        return torch.stack(rows) + (fresh - fresh.detach())


def soft_quantised() -> Entry:
    """Pixels in five levels by steep and differentiable steps."""

    def answer(net: Any, x: Tensor) -> Tensor:
        steps = [torch.sigmoid(4000 * (x - level)) for level in (0.125, 0.375, 0.625, 0.875)]
        return net(sum(steps) / 4)  # type: ignore[no-any-return]

    return wrapped(answer)


def gradient_of_a_robust_net() -> Entry:
    """The answers of a net, the gradients of a robust one times a constant."""
    other = robust(5)
    return wrapped(lambda net, x: 2 * other(x) + (net(x) - 2 * other(x)).detach())


ODD_BROKEN: dict[str, Callable[[], Entry]] = {
    "gradient of another seed": gradient_of_another_seed,
    "seeded by batch size": seeded_by_batch_size,
    "stored images": stored_images,
    "purified": purified,
    "cache by rounded image": lambda: Entry(Cache().eval(), plain()),
    "repeated queries": lambda: Entry(Stateful().eval(), plain()),
    "soft quantised": soft_quantised,
    "gradient of a robust net": gradient_of_a_robust_net,
}

# ------------------------------------------------ honest


def random_threshold() -> Entry:
    """A rejector whose threshold is drawn in every pass."""
    net = plain()

    def score(x: Tensor) -> Tensor:
        return softmax(net(x), 1).amax(1) + 0.1 * torch.randn(len(x))

    return Entry(net, net, score, 0.8, honest=True)


def pooled() -> nn.Module:
    """Max pooling over regions of equal pixels, so that maxima are tied."""
    return nn.Sequential(nn.MaxPool2d(2, 1), nn.Flatten(), Net(49))


def large_images() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(28), nn.Flatten(), Net(64))


def averaged_dropout(net: Any, x: Tensor) -> Tensor:
    feature = net.feature(x)
    return torch.stack([net.classify(dropout(feature, 0.3)) for _ in range(8)]).mean(0)


def mixture() -> Entry:
    """Three nets weighted by a softmax at temperature 0.01 of their confidence."""
    nets = nn.ModuleList(robust(seed) for seed in range(3))

    def answer(nets: Any, x: Tensor) -> Tensor:
        logits = torch.stack([log_softmax(net(x), 1) for net in nets])
        weights = softmax(logits.amax(2, keepdim=True) / 0.01, 0)
        return (weights * logits).sum(0)

    return honest(Wrapped(nets, answer).eval())


def gated() -> Entry:
    """Two nets, and a steep gate by the mean pixel between them."""
    nets = nn.ModuleList((robust(3), robust(4)))

    def answer(nets: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(300 * (x.flatten(1).mean(1, keepdim=True) - 0.3))
        return gate * nets[0](x) + (1 - gate) * nets[1](x)  # type: ignore[no-any-return]

    return honest(Wrapped(nets, answer).eval())


class OwnGenerator(nn.Module):
    """Noise on the pixels from a generator of its own, fresh in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.generator = plain(), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Any:
        return self.net(x + 0.1 * torch.randn(x.shape, generator=self.generator))


def random_contrast() -> Entry:
    """Every image gets a contrast and a brightness of its own."""

    def answer(net: Any, x: Tensor) -> Tensor:
        contrast = 0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)
        return net((x - 0.5) * contrast + 0.5 + 0.1 * torch.randn(len(x), 1, 1, 1))  # type: ignore[no-any-return]

    return random(answer)


def half() -> Entry:
    net = Net()
    net.load_state_dict(robust(1).state_dict())
    return honest(net.half().eval().requires_grad_(False))


ODD_HONEST: dict[str, Callable[[], Entry]] = {
    "mixture at temperature 0.01": mixture,
    "logits times 100": lambda: honest(Wrapped(robust(), lambda net, x: 100 * net(x)).eval()),
    "logits times 1000": lambda: honest(
        Wrapped(robust(6), lambda net, x: 1000 * net(x)).eval()
    ),
    "steep gate between two nets": gated,
    "maximum of three nets": lambda: honest(
        Wrapped(
            nn.ModuleList(robust(seed) for seed in range(3)),
            lambda nets, x: torch.stack([net(x) for net in nets]).amax(0),
        ).eval()
    ),
    "noise from its own generator": lambda: Entry(OwnGenerator().eval(), plain(), honest=True),
    "random threshold": random_threshold,
    "random contrast": random_contrast,
    "noise in the features": lambda: random(
        lambda net, x: net.classify(net.feature(x) + 0.5 * torch.randn(len(x), 48))
    ),
    "ties in max pooling": lambda: honest(trained(pooled)),
    "fp16": half,
    "dropout, mean of 8": lambda: random(averaged_dropout, robust(2)),
    "1x224x224": lambda: honest(
        trained(large_images, change=larger(224), steps=80), change=larger(224)
    ),
}  # fmt: skip
ALL = ZOO | ODD_BROKEN | ODD_HONEST
