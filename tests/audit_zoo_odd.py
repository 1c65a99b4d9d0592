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


def random_threshold() -> Entry:
    """A rejector whose threshold is drawn in every pass."""
    net = plain()

    def score(x: Tensor) -> Tensor:
        return softmax(net(x), 1).amax(1) + 0.1 * torch.randn(len(x))

    return Entry(net, net, score, 0.8)


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


ODD_BROKEN: dict[str, Callable[[], Entry]] = {
    "gradient of another seed": gradient_of_another_seed,
    "seeded by batch size": seeded_by_batch_size,
    "stored images": stored_images,
    "purified": purified,
    "random threshold": random_threshold,
    "cache by rounded image": lambda: Entry(Cache().eval(), plain()),
    "repeated queries": lambda: Entry(Stateful().eval(), plain()),
}

# ------------------------------------------------ honest


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


def half() -> Entry:
    net = Net()
    net.load_state_dict(robust(1).state_dict())
    return honest(net.half().eval().requires_grad_(False))


ODD_HONEST: dict[str, Callable[[], Entry]] = {
    "mixture at temperature 0.01": mixture,
    "logits times 100": lambda: honest(Wrapped(robust(), lambda net, x: 100 * net(x)).eval()),
    "ties in max pooling": lambda: honest(trained(pooled)),
    "fp16": half,
    "dropout, mean of 8": lambda: random(averaged_dropout, robust(2)),
    "1x224x224": lambda: honest(
        trained(large_images, change=larger(224), steps=80), change=larger(224)
    ),
}  # fmt: skip
ALL = ZOO | ODD_BROKEN | ODD_HONEST
