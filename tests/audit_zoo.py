"""Models for tests of the audit's grades: broken ones by many mechanisms, and honest ones.

    entry = ZOO["masked"]()
    entry.model, entry.rejector, entry.twin, entry.images(20)

Every model is made of small nets on the embedded digits. `twin` is the differentiable model behind
a broken one: its adversarial examples are the attack of somebody who knows the mechanism.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, log_softmax, one_hot, relu, softmax

from demur.data import Digits
from demur.output import Output
from demur.rejectors import Con, Energy, RCon

EPS = 0.1
SEED = [0]  # of all weights, and which test images are attacked
STEPS = 300  # of training, where a model asks for no other number
Function = Callable[[Tensor], Any]
same: Function = lambda x: x  # noqa: E731


def use_seed(seed: int) -> None:
    """Make all models that follow with other weights, and attack other images."""
    SEED[0] = seed
    plain.cache_clear()
    robust.cache_clear()


@dataclass(frozen=True, eq=False)
class Entry:
    """A model, whether it is honest, and what the audit needs besides.

    Attributes:
        twin: A model with a gradient whose adversarial examples fool a broken model; None takes the
            model itself.
        change: What is done to images N, 1, 8, 8 before the model gets them.
        labels: What is done to the labels.
        honest: Whether its gradients and answers are what they seem.
    """

    model: Any
    twin: Any = None
    rejector: Any = None
    threshold: float | None = None
    change: Function = same
    labels: Function = same
    eps: float = EPS
    honest: bool = False

    def images(self, n: int, split: Any = "test") -> tuple[Tensor, Tensor]:
        x, y = Digits().load()[split].batch(slice(None))
        rows = (37 * SEED[0] + torch.arange(n)) % len(y)
        return self.change(x[rows]), self.labels(y[rows])


class Net(nn.Module):
    """Two layers from pixels to logits; `after` changes the logits."""

    def __init__(
        self, pixels: int = 64, classes: int = 10, width: int = 48, activation: Function = relu
    ) -> None:
        super().__init__()
        self.hidden, self.classify = nn.Linear(pixels, width), nn.Linear(width, classes)
        self.activation = activation

    def feature(self, x: Tensor) -> Tensor:
        return self.activation(self.hidden(x.flatten(1)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.feature(x))  # type: ignore[no-any-return]


def trained(
    make: Callable[[], nn.Module], robust: bool = True, seed: int = 0, change: Function = same,
    labels: Function = same, steps: int | None = None,
) -> Any:  # fmt: skip
    """Return a net after steps of FGSM training, or of plain training."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed + 1000 * SEED[0])
        net = make()
        x, y = Digits().load()["fit"].batch(slice(None))
        x, y = change(x), labels(y)
        optimiser = torch.optim.Adam(net.parameters(), 0.01)
        for step in range(steps or STEPS):
            rows = torch.arange(128 * step, 128 * (step + 1)) % len(x)
            images = x[rows].requires_grad_()
            if robust:
                (grad,) = torch.autograd.grad(cross_entropy(net(images), y[rows]), images)
                images = (images + EPS * grad.sign()).clamp(0, 1).detach()
            optimiser.zero_grad()
            cross_entropy(net(images.detach()), y[rows]).backward()
            optimiser.step()
    optimiser.zero_grad()
    return net.eval().requires_grad_(False)


@cache
def plain(seed: int = 0) -> Any:
    return trained(Net, robust=False, seed=seed)


@cache
def robust(seed: int = 0) -> Any:
    return trained(Net, seed=seed)


class Wrapped(nn.Module):
    """A function of a net and an image, as a module."""

    def __init__(self, net: nn.Module, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.function = net, function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.net, x)


def wrapped(function: Callable[[Any, Tensor], Any], net: Any = None) -> Entry:
    """Return a broken model made of a plain net, which is its twin."""
    net = net or plain()
    return Entry(Wrapped(net, function).eval(), net)


# ------------------------------------------------ masked: the gradient is not that of the decision


def masked() -> Entry:
    """The labels of one net, the gradient of another."""
    other = robust(1)
    return wrapped(lambda net, x: 10 * hard(net(x)) + log_softmax(other(x), 1))


def as_any(value: Any) -> Any:
    return value


def hard(logits: Tensor) -> Tensor:
    return one_hot(logits.argmax(1), logits.shape[1]).to(logits)


def one_hot_logits() -> Entry:
    return wrapped(lambda net, x: hard(net(x)) + 0 * net(x))


def detached() -> Entry:
    return wrapped(lambda net, x: net(x).detach())


def saturated_tanh() -> Entry:
    """Logits whose own gradient is zero, too; a small part without a gradient keeps the order."""
    return wrapped(lambda net, x: torch.tanh(200 * net(x)) + 1e-3 * net(x).detach())


def saturated_probabilities() -> Entry:
    return wrapped(lambda net, x: softmax(300 * net(x), 1))


def quantised() -> Entry:
    levels: Function = lambda x: (4 * x).round() / 4  # noqa: E731
    net = trained(Net, robust=False, change=levels)
    return wrapped(lambda net, x: net(levels(x)), net)


def thermometer() -> Entry:
    """Pixels as six bits each (Buckman et al. 2018)."""
    above = torch.linspace(0.1, 0.9, 6).view(6, 1, 1)
    net = trained(lambda: Net(6 * 64), robust=False, change=lambda x: (x > above).float())
    soft: Function = lambda x: (25 * (x - above)).sigmoid()  # noqa: E731
    hard_model = wrapped(lambda net, x: net((x > above).float()), net)
    return Entry(hard_model.model, Wrapped(net, lambda net, x: net(soft(x))).eval())


def cosine_basis() -> Tensor:
    k = torch.arange(8.0)
    basis = torch.cos((2 * k + 1)[None] * k[:, None] * math.pi / 16) / 2
    basis[0] /= math.sqrt(2)
    return basis


def jpeg(x: Tensor) -> Tensor:
    """Rounded cosine coefficients, as JPEG has them."""
    basis = cosine_basis()
    rounded = ((basis @ x @ basis.T) / 0.15).round() * 0.15
    return basis.T @ rounded @ basis


def jpeg_defence() -> Entry:
    return wrapped(lambda net, x: net(jpeg(x)), trained(Net, robust=False, change=jpeg))


def shattered() -> Entry:
    """A fast wave on every logit, too small to change many labels."""
    return wrapped(lambda net, x: net(x) + 0.3 * torch.sin(2e4 * net(x)))


def shattered_input() -> Entry:
    return wrapped(lambda net, x: net(x + 0.01 * torch.sin(3e4 * x)))


class Reversed(torch.autograd.Function):
    """The identity with a gradient of the wrong sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


def reversed_gradient() -> Entry:
    return wrapped(lambda net, x: net(as_any(Reversed).apply(x)))


def decoy() -> Entry:
    """A term whose value is zero and whose gradient is large and useless."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        weights = torch.randn(64, 10)

    def answer(net: Any, x: Tensor) -> Tensor:
        extra = 1e3 * x.flatten(1) @ weights
        return net(x) + extra - extra.detach()  # type: ignore[no-any-return]

    return wrapped(answer)


def underflow() -> Entry:
    """Probabilities in 16 bits, most of which are zero."""
    return wrapped(lambda net, x: (softmax(3 * net(x), 1).half().float() + 1e-4).log())


def clipped() -> Entry:
    return wrapped(lambda net, x: net(x).clamp(-2, 2) + 1e-3 * hard(net(x)))


def jump_activations() -> Entry:
    net = plain()
    copy = Net()
    copy.load_state_dict(net.state_dict())
    copy.activation = lambda x: torch.floor(4 * relu(x)) / 4
    return Entry(copy.eval().requires_grad_(False), net)


def vote() -> Entry:
    nets = nn.ModuleList(plain(seed) for seed in range(3))
    mean = Wrapped(nets, lambda nets, x: sum(log_softmax(net(x), 1) for net in nets))
    return Entry(Wrapped(nets, lambda nets, x: sum(hard(net(x)) for net in nets)).eval(), mean)


# ------------------------------------------------ random, or not a function of the image


def seeded_by_input() -> Entry:
    """Noise from a generator that the pixels seed: random, yet the same in every pass."""

    def answer(net: Any, x: Tensor) -> Tensor:
        seeds = (x.double().flatten(1).sum(1) * 1e6).long().tolist()
        noise = [torch.randn(x[0].shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
        return net(x + 0.2 * torch.stack(noise))  # type: ignore[no-any-return]

    return wrapped(answer)


def fixed_seed() -> Entry:
    def answer(net: Any, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        return net(x + 0.2 * noise)  # type: ignore[no-any-return]

    return wrapped(answer)


def batch_statistic() -> Entry:
    """Images are centred by the mean of their batch."""
    return wrapped(lambda net, x: net((x - x.mean(0) + 0.3).clamp(0, 1) if len(x) > 4 else x))


def train_mode_norm() -> Entry:
    net = trained(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), Net()), robust=False)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.train()  # the net itself is in eval mode
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    return Entry(net)


class Counter(nn.Module):
    """Two nets in turn, by the number of calls."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.nets, self.every, self.calls = nn.ModuleList((plain(0), plain(1))), every, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.nets[self.calls // self.every % 2](x)


def counter() -> Entry:
    return Entry(Counter(1).eval(), plain(0))


def slow_counter() -> Entry:
    return Entry(Counter(23).eval(), plain(0))


def order() -> Entry:
    """Each image is mixed with the one before it."""
    return wrapped(lambda net, x: net(0.7 * x + 0.3 * x.roll(1, 0)))


@cache
def known_images() -> Any:
    """Return a function from images to whether they are images of the data set, N."""
    keys = {
        row.numpy().tobytes()
        for split in Digits().load().values()
        for row in split.batch(slice(None))[0].flatten(1)
    }
    return lambda x: torch.tensor(
        [row.numpy().tobytes() in keys for row in x.detach().cpu().flatten(1)], dtype=torch.bool
    )


def lookup() -> Entry:
    """Images of the data set get the labels of a better net, others those of a worse one."""
    known = known_images()
    return wrapped(
        lambda net, x: torch.where(known(x)[:, None], 50 * hard(net(x)), net(x.roll(1, 3)))
    )


def nan_off_the_data() -> Entry:
    known = known_images()
    return wrapped(lambda net, x: torch.where(known(x)[:, None], net(x), torch.nan))


# ------------------------------------------------ random, and masked besides


def noisy(x: Tensor, size: float = 0.1) -> Tensor:
    return x + size * torch.randn_like(x)


def noisy_labels() -> Entry:
    return wrapped(lambda net, x: hard(net(noisy(x))) + 0 * net(x))


def noisy_masked() -> Entry:
    other = robust(1)
    return wrapped(lambda net, x: 10 * hard(net(noisy(x))) + log_softmax(other(x), 1))


def noisy_decoy() -> Entry:
    """A wrong gradient in one pass of two."""
    decoyed = decoy().model

    def answer(net: Any, x: Tensor) -> Any:
        return net(noisy(x)) if torch.rand(()) < 0.5 else decoyed(noisy(x))

    return wrapped(answer)


# ------------------------------------------------ broken rejectors


def masked_score() -> Entry:
    """A confidence whose value has two levels."""
    net = plain()
    return Entry(net, net, lambda x: (softmax(net(x), 1).amax(1) > 0.9).float(), 0.5)


def hashed_rejector() -> Entry:
    return Entry(plain(), plain(), lambda x: known_images()(x).float(), 0.5)


def batch_rejector() -> Entry:
    """The confidence beside that of the other images of the batch."""
    net = plain()

    def score(x: Tensor) -> Tensor:
        con = softmax(net(x), 1).amax(1)
        return con - con.mean() + 0.9

    return Entry(net, net, score, 0.8)


def rounded_energy() -> Entry:
    net = plain()
    return Entry(net, net, lambda x: (net(x).logsumexp(1) / 4).round(), 2.0)


BROKEN: tuple[Callable[[], Entry], ...] = (
    masked, one_hot_logits, detached, saturated_tanh, saturated_probabilities, quantised,
    thermometer, jpeg_defence, shattered, shattered_input, reversed_gradient, decoy, underflow,
    clipped, jump_activations, vote, seeded_by_input, fixed_seed, noisy_labels, noisy_masked,
    noisy_decoy, batch_statistic, train_mode_norm, counter, slow_counter, order, lookup,
    nan_off_the_data, masked_score, hashed_rejector, batch_rejector, rounded_energy,
)  # fmt: skip


# ------------------------------------------------ honest


def honest(model: Any, **options: Any) -> Entry:
    return Entry(model, model, honest=True, **options)


def larger(side: int, channels: int = 1) -> Function:
    return lambda x: interpolate(x, size=(side, side)).repeat(1, channels, 1, 1)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), Net(512)
    )


class WithAux(nn.Module):
    """Logits and the auxiliary logit that R-Con reads."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Output:
        feature = self.net.feature(x)
        logits = self.net.classify(feature)
        top = logits.topk(2).values
        return Output(logits, feature, (top[:, :1] - top[:, 1:] - 2))


def linear() -> Any:
    """A linear net of two classes, whose robust accuracy has a closed form."""
    return trained(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), labels=lambda y: y % 2)


# Random models are honest where the audit, which averages over draws, finds as much as an attack on
# the net behind them. Their gradients are those of their answers, draw by draw.


def random(function: Callable[[Any, Tensor], Any], net: Any = None) -> Entry:
    return replace(wrapped(function, net), honest=True)


def noise_input() -> Entry:
    return random(lambda net, x: net(x + 0.2 * torch.randn_like(x)))


def dropout() -> Entry:
    return random(lambda net, x: net.classify(nn.functional.dropout(net.feature(x), 0.5)))


def random_shift() -> Entry:
    def shifted(net: Any, x: Tensor) -> Tensor:
        dy, dx = (int(k) for k in torch.randint(-1, 2, (2,)))
        return net(x.roll((dy, dx), (2, 3)))  # type: ignore[no-any-return]

    def many(x: Tensor) -> Tensor:
        return torch.cat([x.roll((dy, dx), (2, 3)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)])

    net = trained(Net, robust=False, change=many, labels=lambda y: y.repeat(9), steps=900)
    return random(shifted, net)


def random_member() -> Entry:
    nets = nn.ModuleList(plain(seed) for seed in range(4))
    mean = Wrapped(nets, lambda nets, x: sum(log_softmax(net(x), 1) for net in nets))
    model = Wrapped(nets, lambda nets, x: nets[int(torch.randint(4, (1,)))](x)).eval()
    return Entry(model, mean, honest=True)


def small_noise() -> Entry:
    net = robust()
    return honest(lambda x: net(x + 0.002 * torch.randn_like(x)))


def scaled(factor: float) -> Entry:
    return honest(Wrapped(robust(), lambda net, x: factor * net(x)).eval())


HONEST: dict[str, Callable[[], Entry]] = {
    "robust, seed 0": lambda: honest(robust(0)),
    "robust, seed 1": lambda: honest(robust(1)),
    "robust, seed 2": lambda: honest(robust(2)),
    "plain, seed 0": lambda: honest(plain(0)),
    "plain, seed 1": lambda: honest(plain(1)),
    "wide": lambda: honest(trained(lambda: Net(width=256))),
    "GELU": lambda: honest(trained(lambda: Net(activation=nn.functional.gelu))),
    "tanh": lambda: honest(trained(lambda: Net(activation=torch.tanh))),
    "probabilities": lambda: honest(Wrapped(robust(), lambda net, x: softmax(net(x), 1)).eval()),
    "log-probabilities": lambda: honest(
        Wrapped(robust(), lambda net, x: log_softmax(net(x), 1)).eval()
    ),
    "logits times 0.01": partial(scaled, 0.01),
    "logits times 5": partial(scaled, 5.0),
    # The cross-entropy of these is flat in float32, but AutoAttack also follows the logits.
    "logits times 10000": lambda: honest(Wrapped(plain(), lambda net, x: 1e4 * net(x)).eval()),
    "two classes": lambda: honest(
        trained(lambda: Net(classes=2), labels=lambda y: y % 2), labels=lambda y: y % 2
    ),
    "100 classes": lambda: honest(
        trained(lambda: Net(classes=100), labels=lambda y: 10 * y), labels=lambda y: 10 * y
    ),
    "1x28x28": lambda: honest(
        trained(lambda: Net(784), change=larger(28)), change=larger(28)
    ),
    "3x32x32 convolution": lambda: honest(
        trained(conv, change=larger(32, 3), steps=100), change=larger(32, 3)
    ),
    "Con": lambda: honest(robust(), rejector=Con()),
    "RCon": lambda: honest(WithAux(robust()).eval(), rejector=RCon()),
    "Energy": lambda: honest(robust(1), rejector=Energy()),
    "pixels times 255": lambda: honest(
        Wrapped(robust(), lambda net, x: net((255 * x - 127.5) / 255 + 0.5)).eval()
    ),
    "bf16": lambda: honest(_copy(robust()).bfloat16()),
    "fp64": lambda: honest(_copy(robust()).double()),
    "a function": lambda: honest(robust().forward),
    "mean of three nets": lambda: honest(
        Wrapped(
            nn.ModuleList(robust(seed) for seed in range(3)),
            lambda nets, x: sum(net(x) for net in nets) / 3,
        ).eval()
    ),
    "linear, two classes": lambda: honest(linear(), labels=lambda y: y % 2),
    "small noise": small_noise,
    "noise input": noise_input,
    "noise on a robust net": lambda: random(lambda net, x: net(noisy(x)), robust()),
    "dropout": dropout,
    "random shift": random_shift,
    "random member": random_member,
}  # fmt: skip


def _copy(net: Any) -> Any:
    copy = Net()
    copy.load_state_dict(net.state_dict())
    return copy.eval().requires_grad_(False)


ZOO: dict[str, Callable[[], Entry]] = {
    make.__name__.replace("_", " "): make for make in BROKEN
} | HONEST
