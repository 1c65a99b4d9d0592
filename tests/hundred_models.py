"""Odd models for tests/test_hundred_models.py: small, seeded, images of 3x8x8 to four classes."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional, init
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from demur.output import Output

CLASSES = 4
Change = Callable[[Tensor], Tensor]
same: Change = lambda x: x  # noqa: E731


class Net(nn.Module):
    """A small net; `before` changes the images and `after` the logits."""

    def __init__(self, before: Change = same, after: Callable[[Tensor], Any] = same) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.3)
        self.norm, self.fc = nn.BatchNorm2d(4), nn.Linear(256, CLASSES)
        self.before, self.after = before, after
        self.eval()

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.drop(self.norm(self.conv(x)).relu()).flatten(1))
        return 3 * out

    def forward(self, x: Tensor) -> Any:
        return self.after(self.logits(self.before(x)))


def layers(*middle: nn.Module, channels: int = 3, head: nn.Module | None = None) -> nn.Module:
    """Return a net of the given layers between the image and a linear head."""
    return nn.Sequential(*middle, nn.Flatten(), head or nn.LazyLinear(CLASSES)).eval()


def ready(net: nn.Module) -> nn.Module:
    """Return the net after its lazy layers saw an image."""
    net(torch.zeros(2, 3, 8, 8))
    return net


def built(*middle: nn.Module) -> nn.Module:
    return ready(layers(*middle))


def with_hook(add: Callable[[nn.Module], Any]) -> nn.Module:
    net = Net()
    add(net)
    return net


def changed(change: Callable[[Net], Any]) -> nn.Module:
    net = Net()
    change(net)
    return net


def train_mode(net: nn.Module) -> nn.Module:
    return net.train()


class Raising(Net):
    """A model that takes some batches only."""

    def __init__(self, takes: Callable[[Tensor], bool], error: type[Exception]) -> None:
        super().__init__()
        self.takes, self.error = takes, error

    def forward(self, x: Tensor) -> Any:
        if not self.takes(x):
            raise self.error(f"cannot take shape {tuple(x.shape)}")
        return self.logits(x)


class ChangingBuffers(Net):
    """Counts its calls in a buffer; with `replaces` by another tensor."""

    count: Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.replaces = replaces

    def forward(self, x: Tensor) -> Any:
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count.add_(1)
        return self.logits(x)


class Step(torch.autograd.Function):
    """A step with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class WrongBackward(Step):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("this layer has no backward pass")


class InputGradient(Net):
    """Logits minus a gradient penalty: a backward pass inside the forward pass."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            logits = self.logits(x)
            (grad,) = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
        return logits - grad.square().flatten(1).sum(1, keepdim=True)


class SharedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.conv(self.conv(x).relu()).flatten(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(192, 8, bias=False), nn.Linear(8, 192, bias=False)
        self.up.weight = nn.Parameter(self.down.weight.t().contiguous())
        self.down.weight = nn.Parameter(self.up.weight.t())  # not contiguous
        self.fc = nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.up(self.down(x.flatten(1)).relu()))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.fc = kind(24, 8), nn.Linear(8, CLASSES)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.rnn(x.permute(2, 0, 1, 3).flatten(2))[0][-1])


class Tokens(nn.Module):
    """Rows of the image as tokens of a layer with attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.fc = attention, nn.Linear(24, CLASSES)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        tokens = x.transpose(1, 2).flatten(2)
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.fc(self.attention(tokens, tokens, tokens)[0].mean(1))
        return self.fc(self.attention(tokens).mean(1))


class Embedded(nn.Module):
    """A table of pixel levels: no gradient reaches the images."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(17, 2), nn.Linear(384, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.table((16 * x).long()).flatten(1))


class Loose(nn.Module):
    """Weights in plain attributes, a parameter list, a dictionary and a buffer that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.randn(192, 6)
        self.many = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(2)])
        self.parts = nn.ModuleDict({"fc": nn.Linear(6, CLASSES)})
        self.register_buffer("none", None)
        self.register_buffer("loose", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        out = (x.flatten(1) @ self.plain).tanh()
        for weight in self.many:
            out = (out @ weight).tanh()
        return self.parts["fc"](out)


class Uncopyable(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this object must not be copied")


class OddModes(Net):
    """`eval` and `train` with side effects that nobody may call."""

    def train(self, mode: bool = True) -> Any:
        if hasattr(self, "ready"):
            raise AssertionError("somebody else changed the mode")
        return super().train(mode)


class Options(Net):
    def forward(self, x: Tensor, *more: Any, scale: float = 2.0, **options: Any) -> Any:
        return scale * self.logits(x)


class Deep(Net):
    """As many passes as the brightest image asks for."""

    def forward(self, x: Tensor) -> Any:
        out = self.logits(x)
        for _ in range(int(3 * x.amax())):
            out = out + 0.1 * out.tanh()
        return out


@dataclass
class Answer:
    logits: Tensor
    loss: float = 0.0


class Pair(NamedTuple):
    logits: Tensor
    features: Tensor


class Caller:
    """A callable object with slots; no module."""

    __slots__ = ("net",)

    def __init__(self) -> None:
        self.net = Net()

    def __call__(self, x: Tensor) -> Any:
        return self.net(x)

    def method(self, x: Tensor) -> Any:
        return self.net(x)


def closure(net: nn.Module) -> Any:
    return lambda x: 2 * net(x)


def functional_closure() -> Any:
    net = Net()
    weights = {name: 1.1 * part.detach() for name, part in net.named_parameters()}
    return lambda x: torch.func.functional_call(net, weights, (x,))


def sparse_weights() -> Any:
    weight = torch.randn(CLASSES, 192) * (torch.rand(CLASSES, 192) < 0.3)
    sparse = weight.to_sparse()
    return lambda x: torch.sparse.mm(sparse, x.flatten(1).t()).t()


def complex_weights() -> Any:
    weight = torch.randn(192, CLASSES, dtype=torch.complex64)
    return lambda x: (x.flatten(1).to(torch.complex64) @ weight).abs()


def own_generator() -> Any:
    generator = torch.Generator().manual_seed(0)
    return Net(after=lambda z: z + torch.rand(z.shape, generator=generator))


def quantised() -> nn.Module:
    """A net in int8, by the first engine that runs here: torch's default fails on some ARM CPUs."""
    net, engines = Net(), torch.backends.quantized
    for engine in (engines.engine, *engines.supported_engines):
        engines.engine = engine
        try:
            made = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
            made(torch.zeros(1, 3, 8, 8))
        except RuntimeError:
            continue
        return cast(nn.Module, made)
    pytest.skip("torch has no quantised engine for this processor")


def traced() -> nn.Module:
    return cast(nn.Module, torch.jit.trace(layers(head=nn.Linear(192, 4)), torch.rand(2, 3, 8, 8)))


def scripted() -> nn.Module:
    return cast(nn.Module, torch.jit.script(layers(head=nn.Linear(192, 4))))


def inference_tensors() -> nn.Module:
    with torch.inference_mode():
        return Net()


def old_gradients(net: Net) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)


def half_head(net: Net) -> None:
    net.after = lambda z: z.half()


def global_noise(x: Tensor) -> Tensor:
    return x + 0.3 * torch.rand_like(x)


def detached(x: Tensor) -> Tensor:
    return x.detach()


def in_place(x: Tensor) -> Tensor:
    return x.mul_(0.5).clamp_(0.1)


def hidden_in_place(x: Tensor) -> Tensor:
    x.data.add_(0.1)
    return x


def unseen(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)) if x.requires_grad else None
    return x


def frequencies(x: Tensor) -> Tensor:
    back: Tensor = torch.fft.ifft2(torch.fft.fft2(x)).real
    return back


def no_grad_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sqrt()


def inference_inside(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.sqrt()


def autocast_inside(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.einsum("nchw,cd->ndhw", x, torch.eye(3)).float()


def nan_where_bright(z: Tensor) -> Tensor:
    return z * torch.where(z[:, :1] > z[:, :1].median(), torch.nan, 1.0)


def zero_gradient(z: Tensor) -> Tensor:
    return functional.one_hot(z.argmax(1), CLASSES).float() + 0 * z


def grid(x: Tensor) -> Tensor:
    place = functional.affine_grid(torch.eye(2, 3).repeat(len(x), 1, 1), list(x.shape), False)
    return functional.grid_sample(x, place, align_corners=False)


def say(z: Tensor) -> Tensor:
    print("a model that talks")
    return z


def python_noise(z: Tensor) -> Tensor:
    return z + random.random()


def numpy_noise(z: Tensor) -> Tensor:
    return z + float(np.random.rand())


def changed_modes() -> nn.Module:
    net = OddModes()
    net.ready = True  # type: ignore[assignment]
    return net


SENTENCE = {  # models that cannot be attacked, with a part of the sentence that says why
    "NaN logits": (lambda: Net(after=lambda z: z * torch.nan), "not a number"),
    "NaN for some images": (lambda: Net(after=nan_where_bright), "not a number"),
    "infinite logits": (lambda: Net(after=lambda z: z + torch.inf), "not a number"),
    "infinite weights": (lambda: changed(lambda net: init.constant_(net.fc.weight, torch.inf)),
                         "not a number"),
    "one class": (lambda: Net(after=lambda z: z[:, :1]), "one class only"),
    "too few classes": (lambda: Net(after=lambda z: z[:, :2]), "labels must be from 0 to 1"),
    "no classes": (lambda: Net(after=lambda z: z[:, :0]), "logits (N, C)"),
    "vector": (lambda: Net(after=lambda z: z[:, 0]), "logits with one row per image"),
    "three axes": (lambda: Net(after=lambda z: z[:, None]), "logits with one row per image"),
    "scalar": (lambda: Net(after=lambda z: z.sum()), "logits with one row per image"),
    "one row": (lambda: Net(after=lambda z: z.mean(0, keepdim=True)), "one row per image"),
    "two rows each": (lambda: Net(after=lambda z: z.repeat(2, 1)), "2 rows for 1 images"),
    "None": (lambda: Net(after=lambda z: None), "NoneType"),
    "text": (lambda: Net(after=lambda z: "cat"), "not str"),
    "NumPy output": (lambda: Net(after=lambda z: z.detach().numpy()), "return a tensor"),
    "empty tuple": (lambda: Net(after=lambda z: ()), "not tuple"),
    "mapping without logits": (lambda: Net(after=lambda z: {"scores": z}), "not dict"),
    "other shape": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, CLASSES)), "the model fails"),
    "other channels": (lambda: layers(nn.Conv2d(1, 2, 3), head=nn.Linear(72, CLASSES)),
                       "the model fails"),
    "needs N, H, W, C": (lambda: Raising(lambda x: x.shape[-1] == 3, RuntimeError),
                         "the model fails"),
    "no single image": (lambda: Raising(lambda x: len(x) > 1, RuntimeError), "the model fails"),
    "no single image, ValueError": (lambda: Raising(lambda x: len(x) > 1, ValueError),
                                    "the model fails"),
    "an assertion": (lambda: Raising(lambda x: False, AssertionError), "the model fails"),
    "a type error": (lambda: Raising(lambda x: False, TypeError), "the model fails"),
    "a missing key": (lambda: Raising(lambda x: False, KeyError), "the model fails"),
    "not implemented": (nn.Module, "the model fails"),
    "fixed batch size": (lambda: Raising(lambda x: len(x) == 1, RuntimeError), "the model fails"),
    "no backward pass": (lambda: Net(before=WrongBackward.apply), "has no backward pass"),
}  # fmt: skip

RANDOM = {  # models whose outputs are random: no verdict of one image can be repeated
    "dropout in train mode": lambda: changed(lambda net: net.drop.train()),
    "train mode": lambda: train_mode(Net()),
    "global noise": lambda: Net(before=global_noise),
    "own generator": own_generator,
    "Python's generator": lambda: Net(after=python_noise),
    "NumPy's generator": lambda: Net(after=numpy_noise),
    "alpha dropout": lambda: train_mode(layers(nn.AlphaDropout(0.2), head=nn.Linear(192, 4))),
    "Gumbel": lambda: Net(after=functional.gumbel_softmax),
    "batch norm of the batch": lambda: changed(lambda net: net.norm.train()),
    "batch norm without statistics": lambda: changed(
        lambda net: setattr(net, "norm", nn.BatchNorm2d(4, track_running_stats=False))
    ),
    "minus the batch mean": lambda: Net(after=lambda z: z - z.mean(0)),
    "sorted batch": lambda: Net(after=lambda z: z.sort(0).values),
}

RIGHT: dict[str, Callable[[], Any]] = {  # models with a verdict that the model itself confirms
    "plain": Net,
    "normalised": lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False).eval(), Net()),
    "forward hook": lambda: with_hook(lambda net: net.register_forward_hook(lambda *given: None)),
    "hook that changes logits": lambda: with_hook(
        lambda net: net.register_forward_hook(lambda module, given, out: 2 * out)
    ),
    "forward pre-hook": lambda: with_hook(
        lambda net: net.register_forward_pre_hook(lambda *given: None)
    ),
    "backward hook": lambda: with_hook(
        lambda net: net.register_full_backward_hook(lambda *given: None)
    ),
    "backward pre-hook": lambda: with_hook(
        lambda net: net.register_full_backward_pre_hook(lambda *given: None)
    ),
    "parameter hook": lambda: changed(lambda net: net.fc.weight.register_hook(lambda grad: None)),
    "state hook": lambda: with_hook(
        lambda net: net.register_state_dict_post_hook(lambda *given: None)
    ),
    "hook on the images": lambda: Net(before=unseen),
    "instance norm": lambda: built(nn.InstanceNorm2d(3)),
    "group norm": lambda: built(nn.GroupNorm(3, 3)),
    "layer norm": lambda: built(nn.LayerNorm([3, 8, 8])),
    "local response norm": lambda: built(nn.LocalResponseNorm(2)),
    "float64": lambda: Net().double(),
    "half": lambda: Net().half(),
    "bfloat16": lambda: Net().bfloat16(),
    "half logits": lambda: changed(half_head),
    "double head": lambda: changed(lambda net: setattr(net, "after", lambda z: z.double())),
    "integer logits": lambda: Net(after=lambda z: (10 * z).long().float()),
    "frozen": lambda: Net().requires_grad_(False),
    "half frozen": lambda: changed(lambda net: net.conv.requires_grad_(False)),
    "old gradients": lambda: changed(old_gradients),
    "in-place input": lambda: Net(before=in_place),
    "hidden in-place input": lambda: Net(before=hidden_in_place),
    "in-place ReLU": lambda: layers(nn.ReLU(inplace=True), head=nn.Linear(192, CLASSES)),
    "masked class": lambda: Net(after=lambda z: z.index_fill(1, torch.tensor(3), -torch.inf)),
    "constant": lambda: Net(after=lambda z: 0 * z),
    "constant, no graph": lambda: lambda x: torch.eye(CLASSES)[0].expand(len(x), -1),
    "large logits": lambda: Net(after=lambda z: 1e30 * z),
    "small logits": lambda: Net(after=lambda z: 1e-30 * z),
    "probabilities": lambda: Net(after=lambda z: z.softmax(1)),
    "log probabilities": lambda: Net(after=lambda z: z.log_softmax(1)),
    "saturated": lambda: Net(after=lambda z: (100 * z).softmax(1)),
    "zero gradient": lambda: Net(after=zero_gradient),
    "rounded": lambda: Net(before=lambda x: (8 * x).round() / 8),
    "quantised": quantised,
    "scripted": scripted,
    "traced": traced,
    "TorchScript inside": lambda: nn.Sequential(scripted()),
    "shared convolution": SharedConv,
    "tied weights": Tied,
    "two views of one net": lambda: Net(after=lambda z: torch.stack((z, z)).mean(0)),
    "many classes": lambda: layers(head=nn.Linear(192, 1000)),
    "five classes": lambda: layers(head=nn.Linear(192, CLASSES + 1)),
    "non-contiguous logits": lambda: Net(after=lambda z: z.t().contiguous().t()),
    "non-contiguous inside": lambda: Net(before=lambda x: x.transpose(2, 3)),
    "channels-last inside": lambda: Net(before=lambda x: x.to(memory_format=torch.channels_last)),
    "flipped view": lambda: Net(before=lambda x: x.flip(3)),
    "lazy layers": layers,
    "frequencies": lambda: Net(before=frequencies),
    "complex weights": complex_weights,
    "sparse weights": sparse_weights,
    "orthogonal": lambda: changed(lambda net: parametrizations.orthogonal(net.fc)),
    "spectral norm": lambda: changed(lambda net: parametrizations.spectral_norm(net.fc)),
    "old spectral norm": lambda: changed(lambda net: spectral_norm(net.fc)),
    "weight norm": lambda: changed(lambda net: parametrizations.weight_norm(net.fc)),
    "old weight norm": lambda: changed(lambda net: weight_norm(net.fc)),
    "pruned": lambda: changed(lambda net: prune.l1_unstructured(net.fc, "weight", 0.5)),
    "DataParallel": lambda: nn.DataParallel(Net()),
    "function": lambda: Caller().method,
    "lambda": lambda: closure(Net()),
    "callable object": Caller,
    "partial": lambda: partial(Net().forward),
    "functional call": functional_closure,
    "tuple": lambda: Net(after=lambda z: (z,)),
    "tuple with auxiliary": lambda: Net(after=lambda z: (z, z[:, :1].exp())),
    "list": lambda: Net(after=lambda z: [z]),
    "dictionary": lambda: Net(after=lambda z: {"logits": z, "loss": None}),
    "dataclass": lambda: Net(after=Answer),
    "named tuple": lambda: Net(after=lambda z: Pair(z, z[:, :1])),
    "namespace": lambda: Net(after=lambda z: SimpleNamespace(logits=z)),
    "Output": lambda: Net(after=lambda z: Output(z, z[:, :0], z[:, :1])),
    "subclass of Tensor": lambda: Net(after=lambda z: z.as_subclass(nn.Buffer)),
    "prints": lambda: Net(after=say),
    "counts in a buffer": lambda: ChangingBuffers(replaces=False),
    "replaces a buffer": lambda: ChangingBuffers(replaces=True),
    "no_grad inside": lambda: Net(before=no_grad_inside),
    "inference mode inside": lambda: Net(before=inference_inside),
    "inference tensors": inference_tensors,
    "detached": lambda: Net(before=detached),
    "autocast inside": lambda: Net(before=autocast_inside),
    "own gradient": lambda: Net(before=Step.apply),
    "checkpointing": lambda: changed(
        lambda net: setattr(net, "before", lambda x: checkpoint(torch.sin, x, use_reentrant=False))
    ),
    "gradient inside": InputGradient,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "attention": lambda: Tokens(nn.MultiheadAttention(24, 2, batch_first=True)),
    "transformer layer": lambda: Tokens(nn.TransformerEncoderLayer(24, 2, 16, batch_first=True)),
    "embedding": Embedded,
    "loose weights": Loose,
    "depthwise": lambda: built(nn.Conv2d(3, 6, 3, groups=3)),
    "dilated": lambda: built(nn.Conv2d(3, 4, 3, dilation=2)),
    "circular padding": lambda: built(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")),
    "transposed convolution": lambda: built(nn.ConvTranspose2d(3, 2, 2, 2)),
    "3D convolution": lambda: built(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, 3)),
    "1D convolution": lambda: built(nn.Flatten(2), nn.Conv1d(3, 4, 5)),
    "maximum pooling": lambda: built(nn.MaxPool2d(2)),
    "fractional pooling": lambda: built(nn.LPPool2d(2, 2)),
    "adaptive pooling": lambda: built(nn.AdaptiveAvgPool2d(3)),
    "larger images": lambda: built(nn.Upsample(scale_factor=2, mode="bilinear")),
    "pixel shuffle": lambda: built(nn.PixelUnshuffle(2)),
    "grid sample": lambda: Net(before=grid),
    "median": lambda: Net(before=lambda x: x - x.flatten(1).median(1).values[:, None, None, None]),
    "top k": lambda: Net(after=lambda z: z.where(z >= z.topk(2).values[:, 1:], z - 9)),
    "data-dependent depth": Deep,
    "data-dependent branch": lambda: Net(after=lambda z: 2 * z if bool(z.mean() > 0) else z),
    "not copyable": Uncopyable,
    "odd modes": changed_modes,
    "further arguments": Options,
    "deep copy of a net": lambda: copy.deepcopy(Net()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(Net()))),
    "sub-module in train mode": lambda: changed(lambda net: net.fc.train()),
}
