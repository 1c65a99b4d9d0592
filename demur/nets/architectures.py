"""Pre-activation ResNets, and nets that a function of the user builds, with the head of demur.

ResNet-18 and WideResNet-34-10 are those of the paper; ResNet-8 is for 8x8 images. A user's model is
code: `demur/spec/importing.py` says which functions are imported.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu

from demur.errors import BadInput, first_line, shorten
from demur.images import Domain
from demur.nets.net import AuxiliaryHead, Conv1x1, Conv3x3, NetSpec, Norm2d, RejectingNet, Trunk
from demur.output import Output
from demur.spec import later
from demur.spec.field_types import PositiveInt
from demur.spec.importing import check_import_path, import_object

LARGE = 96  # pixels from which images get the stem of ImageNet
Activation = Literal["relu", "silu"]
ACTIVATIONS = {"relu": relu, "silu": silu}


class Block(nn.Module):
    """A pre-activation residual block: maps N, C, H, W to N, width, H / stride, W / stride.

    Batch norm, activation, 3x3 convolution, twice, plus a shortcut (He et al. 2016). The shortcut
    is the identity if the shapes agree, otherwise a 1x1 convolution of the activated input, as in
    the reference code.
    """

    def __init__(
        self, width_in: int, width: int, stride: int, activation: Activation = "relu"
    ) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        self.norm1 = Norm2d(width_in)
        self.conv1 = Conv3x3(width_in, width, stride)
        self.norm2 = Norm2d(width)
        self.conv2 = Conv3x3(width, width)
        same = stride == 1 and width_in == width
        self.shortcut = None if same else Conv1x1(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.activate(self.norm1(x))
        skip: Tensor = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(self.activate(self.norm2(self.conv1(active))))
        return out + skip


class ResidualTrunk(Trunk):
    """A stem convolution, then one stage of `depth` blocks per width.

    Every stage but the first halves height and width. `large` is the stem for large images: a 7x7
    convolution and a max pool, each of stride 2, instead of a 3x3 convolution.
    """

    def __init__(
        self, channels: int, stem: int, widths: Sequence[int], depth: int, large: bool = False,
        activation: Activation = "relu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        self.dims = tuple(widths)
        self.large = large
        self.stem: nn.Module
        if large:  # as for ImageNet, but without a norm, which the pre-activation form has later
            conv = nn.Conv2d(channels, stem, 7, stride=2, padding=3, bias=False)
            self.stem = nn.Sequential(conv, nn.MaxPool2d(3, stride=2, padding=1))
        else:
            self.stem = Conv3x3(channels, stem)
        self.stages = nn.ModuleList()
        for i, width in enumerate(widths):
            width_in = widths[i - 1] if i else stem
            blocks = [Block(width_in, width, 2 if i else 1, activation)]
            blocks += [Block(width, width, 1, activation) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(*blocks))
        self.norm = Norm2d(widths[-1])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(global_average_pool(x))
        return [*features[:-1], global_average_pool(ACTIVATIONS[self.activation](self.norm(x)))]


def global_average_pool(maps: Tensor) -> Tensor:
    """Return the mean over height and width (N, C), in fp32 or fp64."""
    return maps.mean((2, 3), dtype=torch.promote_types(maps.dtype, torch.float32))


@dataclass(frozen=True)
class ResNet18(NetSpec):
    """Pre-activation ResNet-18: four stages of two blocks.

    The "ResNet-18" of the reference code is this pre-activation net, with width 64. Images from
    96 pixels on get the usual stem of ImageNet (7x7 and max pool), smaller ones that of CIFAR.

    Args:
        width: channels of the first stage; the later stages have 2, 4 and 8 times as many.
        activation: "relu", for which there are fused kernels, or "silu".

    Example:
        >>> import torch
        >>> from demur import CIFAR10, RR, ResNet18
        >>> net = ResNet18(width=4).build(CIFAR10().domain, RR())
        >>> net(torch.rand(2, 3, 32, 32)).logits.shape
        torch.Size([2, 10])
    """

    width: PositiveInt = 64
    activation: Activation = field(default="relu", metadata=later("relu"))

    def trunk(self, domain: Domain) -> ResidualTrunk:
        widths = [self.width * factor for factor in (1, 2, 4, 8)]
        large = min(domain.shape[1:]) >= LARGE
        return ResidualTrunk(domain.shape[0], self.width, widths, 2, large, self.activation)


@dataclass(frozen=True)
class ResNet8(NetSpec):
    """Pre-activation ResNet-8: three stages of one block; 78 thousand weights by default.

    Args:
        width: channels of the first stage; the later stages have 2 and 4 times as many.

    Example:
        >>> from demur import RR, Digits, ResNet8
        >>> ResNet8(width=4).build(Digits().domain, RR()).trunk.dims
        (4, 8, 16)
    """

    width: PositiveInt = 16

    def trunk(self, domain: Domain) -> ResidualTrunk:
        widths = [self.width * factor for factor in (1, 2, 4)]
        return ResidualTrunk(domain.shape[0], self.width, widths, depth=1)


@dataclass(frozen=True)
class WideResNet(NetSpec):
    """WideResNet: three stages of (depth - 4) / 6 blocks with 16, 32, 64 times `widen` channels.

    Args:
        depth: number of layers, 6n + 4; another depth raises BadInput.
        widen: factor of the channels; 10 in the paper.

    Example:
        >>> from demur import CIFAR10, RR, WideResNet
        >>> WideResNet(depth=10, widen=1).build(CIFAR10().domain, RR()).trunk.dims
        (16, 32, 64)
    """

    depth: PositiveInt = 34
    widen: PositiveInt = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 10 or (self.depth - 4) % 6:
            raise BadInput(
                f"WideResNet needs a depth of 6n + 4, such as 28 or 34, not {self.depth}"
            )

    def trunk(self, domain: Domain) -> ResidualTrunk:
        widths = [16 * self.widen * f for f in (1, 2, 4)]
        return ResidualTrunk(domain.shape[0], 16, widths, depth=(self.depth - 4) // 6)

    def initialise(self, net: RejectingNet) -> None:
        # as in the reference code of WideResNet
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


class FactoryTrunk(Trunk):
    """The user's module: images to (its output, the features that the head reads).

    Without `layer` its last linear layer has been taken out, so its output is the features.
    """

    def __init__(self, module: nn.Module, layer: str) -> None:
        super().__init__()
        self.module, self.layer = module, layer

    def forward(self, x: Tensor) -> list[Tensor]:
        if not self.layer:
            feature: Tensor = self.module(x)
            return [feature, feature]
        kept: list[Tensor] = []
        layer = self.module.get_submodule(self.layer)
        handle = layer.register_forward_hook(lambda _module, _inputs, out: kept.append(out))
        try:
            out: Tensor = self.module(x)
        finally:
            handle.remove()
        return [out, _pooled(kept[-1])]


class FactoryRejectingNet(RejectingNet):
    """A user's module with the auxiliary head of demur."""

    def __init__(
        self, domain: Domain, trunk: FactoryTrunk, aux: nn.Module, classify: nn.Module
    ) -> None:
        super().__init__(domain, trunk, aux)
        self.classify = classify  # type: ignore[assignment]  # the user's layer, or the identity

    def forward(self, x: Tensor) -> Output:
        self.check_images(x)
        out, feature = self.trunk(x)
        with torch.autocast(x.device.type, enabled=False):
            feature = feature.to(self.normalise.mean.dtype)
            return Output(self.classify(out.to(feature.dtype)), feature, self.aux([feature]))


@dataclass(frozen=True)
class FactoryNet(NetSpec):
    """A net that a function of yours returns: images in [0, 1], N, C, H, W, to logits.

    The function is called with those of num_classes, channels and size that it has parameters
    for. The net normalises by itself. The head reads the input of its last linear layer, or the
    output of `layer`.

    Args:
        function: "module:function".
        layer: Name of the layer whose output the head reads; empty: the input of the last linear
            layer, which must return the logits.
        frozen: Keep the weights that the function returns and train the head alone.

    Raises:
        BadInput: `build` may not import the function, or its net does not fit.

    Example:
        >>> from demur import FactoryNet
        >>> FactoryNet("my_nets:make", layer="backbone.pool").frozen
        False
    """

    function: str
    layer: str = ""
    frozen: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_import_path(self.function)

    @property
    def trains_head_alone(self) -> bool:
        return self.frozen

    def check(self, domain: Domain) -> None:
        function = self._function()
        with torch.random.fork_rng(devices=[]):
            self._split(self._module(function, domain), domain)

    def trunk(self, domain: Domain) -> Trunk:
        raise BadInput("a FactoryNet is built for a whole domain; call build")

    def build(self, domain: Domain, head: AuxiliaryHead, seed: int = 0) -> RejectingNet:
        function = self._function()
        # on the CPU even where the caller asks for weights without memory: the net is tried
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            module = self._module(function, domain)
            classify, dim = self._split(module, domain)
            trunk = FactoryTrunk(module, self.layer)
            trunk.dims = (dim,)
            plain = domain._replace(mean=(0.0,) * domain.shape[0], std=(1.0,) * domain.shape[0])
            net = FactoryRejectingNet(plain, trunk, head.build((dim,), domain.classes), classify)
        if self.frozen:
            net.freeze()
        return net

    def _function(self) -> Callable[..., Any]:
        function = import_object(self.function)
        if callable(function):
            return function  # type: ignore[no-any-return]
        raise BadInput(f"{self.function} is not a function; name one that returns a net")

    def _module(self, function: Callable[..., Any], domain: Domain) -> nn.Module:
        """Call the function and check that it returns a net for these images."""
        channels, size, _ = domain.shape
        known = {"num_classes": domain.classes, "channels": channels, "size": size}
        try:
            wanted = inspect.signature(function).parameters
            module = function(**{name: known[name] for name in known if name in wanted})
        except Exception as error:  # a user's function may raise anything
            raise BadInput(
                f"{self.function} fails ({type(error).__name__}: {shorten(first_line(error))}); it "
                "is called with num_classes, channels and size, as far as it has them"
            ) from None
        if not isinstance(module, nn.Module):
            raise BadInput(f"{self.function} must return a torch.nn.Module")
        return module

    def _split(self, module: nn.Module, domain: Domain) -> tuple[nn.Module, int]:
        """Return the module that gives logits, and the width of the features.

        Without a named layer, the last linear layer is taken out of the module.
        """
        parts = {name: part for name, part in module.named_modules() if name}
        layers = ", ".join([*parts][-8:]) or "its layers"
        advice = f"name the layer of the features with layer=NAME, one of {layers}"
        linear = [name for name, part in parts.items() if isinstance(part, nn.Linear)]
        name = self.layer or (linear[-1] if linear else "")
        if name not in parts:
            lacking = f"no layer {name!r}" if name else "no linear layer"
            raise BadInput(f"the net of {self.function} has {lacking}; {advice}")
        inputs, outputs, logits = _probe(module, name, domain, self.function)
        if self.layer:
            return nn.Identity(), _pooled(outputs).shape[1]
        last = module.get_submodule(name)
        if inputs.ndim != 2 or logits.shape != outputs.shape or not torch.equal(logits, outputs):
            raise BadInput(
                f"the last linear layer {name!r} of {self.function} does not return the logits; "
                f"{advice}"
            )
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, nn.Identity())
        return last, inputs.shape[1]


def _probe(
    module: nn.Module, name: str, domain: Domain, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Input and output of a layer, and the logits, for two grey images."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = module.get_submodule(name).register_forward_hook(
        lambda _module, inputs, out: seen.append((inputs[0], out))
    )
    was_training = module.training
    try:
        with torch.no_grad():
            logits = module.eval()(torch.full((2, *domain.shape), 0.5))
    except Exception as error:  # a user's net may raise anything
        raise BadInput(
            f"the net of {function} fails on images of shape {domain.shape} "
            f"({type(error).__name__}: {shorten(first_line(error))}); set size= and channels= of "
            "the data"
        ) from None
    finally:
        handle.remove()
        module.train(was_training)
    if not isinstance(logits, Tensor) or logits.shape != (2, domain.classes) or not seen:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise BadInput(
            f"the net of {function} must return logits of shape N, {domain.classes}, not {found}"
        )
    return *seen[-1], logits


def _pooled(feature: Tensor) -> Tensor:
    """Features as N, D; maps (N, D, H, W) are averaged over positions."""
    return feature if feature.ndim == 2 else feature.flatten(2).mean(2)
