"""Nets that a function of the user builds, and the head of demur on their features.

A model is code: `demur/spec/importing.py` says which functions are imported.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demur.errors import BadInput, first_line, shorten
from demur.images import Domain
from demur.nets.net import AuxiliaryHead, NetSpec, RejectingNet, Trunk
from demur.output import Output
from demur.spec.importing import check_import_path, import_object


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
