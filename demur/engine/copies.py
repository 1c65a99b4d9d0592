"""Copies of a net for attacks: frozen weights in the dtype of the attack's convolutions.

A `ModelCopy` computes no weight gradients, and its weights are cast once; `refresh` copies them
again after a training step. A `FastCopy` of any module in eval mode has batch norm folded,
channels-last maps and bf16 by autocast. Autocast computes layer norm in fp32, and a sum with an
fp32 parameter is fp32 as well; `pure_bf16` rounds these too, for transformers.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.jit._fuser import optimized_execution
from torch.jit._trace import TracerWarning
from torch.nn import functional
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from demur.attacks.attack_model import Gradient, Model, ObjectiveFunction
from demur.engine.fused_graph import fuse_activations, norm_coefficients
from demur.errors import BadInput
from demur.nets import RejectingNet
from demur.nets.net import MIN_CHANNELS
from demur.numerics import Precision, autocast, no_autocast, products_dtype, tf32
from demur.output import Output, as_output

P = ParamSpec("P")
R = TypeVar("R")
Compiler = Literal["inductor", "aot_eager", "none"]
ObjectiveForward = Callable[..., tuple[Tensor, Tensor, Output]]  # of x, y, *inputs
Query = Literal["gradient", "gradients", "gradient_only", "value"]
QueryFunction = Callable[..., Gradient]  # of objective, query, x, y, *inputs


class ModelCopy:
    """A copy of `source` in train or eval mode, with the source's running statistics."""

    def __init__(self, source: RejectingNet, train: bool, precision: Precision) -> None:
        self.source, self.precision = source, precision
        self.net = copy.deepcopy(source).requires_grad_(False).train(train)
        on_gpu = next(source.parameters()).is_cuda
        layout = torch.channels_last if on_gpu else torch.preserve_format
        for name, module in source.named_modules():
            own = self.net.get_submodule(name)
            own._buffers = module._buffers
            if isinstance(own, nn.Conv2d):
                weight = own.weight.data.to(products_dtype(precision), memory_format=layout)
                own.weight.data = weight

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the source."""
        torch._foreach_copy_(list(self.net.parameters()), list(self.source.parameters()))

    def forward(self, x: Tensor) -> Output:
        with autocast(self.precision, x.device):
            out: Output = self.net(x)
        return out

    def objective_forward(
        self, objective: ObjectiveFunction, compiler: Compiler, skip_aux: bool = False
    ) -> ObjectiveForward:
        """Return a compiled function of (x, y, *inputs) for one gradient query.

        It returns the sum of the objective, differentiable in x, the objective of each image (N),
        and the output. `skip_aux` leaves the auxiliary output empty.
        """

        def forward(x: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Output]:
            return query_result(objective(out := self.forward(x), y, *inputs), out, skip_aux)

        return compile_function(forward, compiler)


def replace_module(net: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of this name."""
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)


def query_result(value: Tensor, out: Output, skip_aux: bool) -> tuple[Tensor, Tensor, Output]:
    """Return the sum, the values and the output of a gradient query; only the sum has a graph.

    For values of several objectives, N, M, there are M sums.
    With `skip_aux` the auxiliary output is a new tensor of width 0. A slice of width 0 would keep
    the auxiliary head in the compiled graph.
    """
    aux = out.logits.new_zeros(len(out.logits), 0) if skip_aux else out.aux
    shown = Output(out.logits, out.feature, aux)  # torch 2.8 cannot compile out._replace
    return value.sum(0), value.detach(), shown.detached()


def input_gradient(total: Tensor, x: Tensor, query: Query) -> Tensor:
    """Return the gradient that a query asks for: of one sum, of several (N, M, ...), or none."""
    if query == "value":
        return x[:, :0]
    with no_autocast(x.device):
        if query == "gradients":
            sums = total.unbind()
            return torch.stack(
                [torch.autograd.grad(part, x, retain_graph=True)[0] for part in sums], 1
            )
        (grad,) = torch.autograd.grad(total, x)
        return grad


def compile_function(function: Callable[P, R], compiler: Compiler) -> Callable[P, R]:
    """Return the function compiled for static shapes, or unchanged if the compiler is "none"."""
    if compiler == "none":
        return function

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    # torch.compile keeps at most eight versions of a code object: each function gets its own
    wrapper.__code__ = wrapper.__code__.replace()
    compiled: Callable[P, R] = torch.compile(
        wrapper, dynamic=False, fullgraph=True, backend=compiler
    )
    return compiled


SCRIPT_TOLERANCE = 1e-4  # of the largest logit
FOLD_TOLERANCE = 1e-3  # of the largest logit, in fp32
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
NORMS = {  # which autocast computes in fp32
    functional.layer_norm, functional.group_norm, functional.rms_norm,
    torch.layer_norm, torch.group_norm, torch.rms_norm,
}  # fmt: skip
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class CannotCopy(BadInput):
    """A model that cannot be copied; the message is the reason, without a subject."""


@dataclass(frozen=True)
class CopySettings:
    """How a copy computes."""

    precision: Precision  # of convolutions and matrix products
    channels_last: bool  # the layout of maps in memory
    pure_bf16: bool = False  # with bf16: other norms than batch norm, and sums with parameters, too

    def __str__(self) -> str:
        layout = "channels-last" if self.channels_last else "contiguous"
        return f"{self.precision}{' throughout' if self.pure_bf16 else ''}, {layout}"


class Call(NamedTuple):
    """One call of a convolution, linear layer or batch norm in a forward pass."""

    module: nn.Module
    given: Tensor
    returned: Tensor


class FastCopy:
    """The copy; calling it returns an Output.

    Layers are traced and folding is checked on the images x. `folded` is the number of batch norms
    that were folded into convolutions.
    """

    def __init__(self, model: nn.Module, settings: CopySettings, x: Tensor) -> None:
        self.settings, self.device = settings, x.device
        self.net, self.folded = _folded_copy(model, x)
        if x.is_cuda and settings.channels_last:  # the layout of the kernels
            self.net = fuse_activations(self.net, x)
        out, calls = _trace(self.net, x)
        layers = [call.module for call in calls if isinstance(call.module, nn.Conv2d | nn.Linear)]
        classes = as_output(out).logits.shape[-1]
        heads = {layer for layer in layers if layer.weight.shape[0] == classes} | {*layers[-1:]}
        for layer in {*layers} - heads:
            if x.is_cuda and isinstance(layer, nn.Conv2d) and layer.in_channels < MIN_CHANNELS:
                _pad_channels(layer)
            _cast(layer, settings)
        if settings.pure_bf16:
            _cast_parameters(self.net, heads)
        for layer in heads:
            _run_in_fp32(layer)
        self._scripted: torch.jit.ScriptModule | None = None

    def __call__(self, x: Tensor) -> Output:
        if self._scripted is not None and not torch.is_grad_enabled():
            with optimized_execution(False):  # else each new batch size is profiled
                return as_output(self._scripted(_contiguous_copy(x)), len(x))
        layout = torch.channels_last if self.settings.channels_last else torch.contiguous_format
        x = x.clone(memory_format=layout)  # which the model may change in place
        norms = Bf16Norms(x.device) if self.settings.pure_bf16 else nullcontext()
        with autocast(self.settings.precision, x.device), tf32(self.settings.precision), norms:
            return as_output(self.net(x), len(x))

    def query(
        self, objective: ObjectiveFunction, query: Query, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> Gradient:
        """Compute a query; its gradient is contiguous in either memory format of the copy."""
        differentiate = query != "value"
        with torch.set_grad_enabled(differentiate):
            x = x.detach().requires_grad_(differentiate)
            out = self(x)
            total, value, out = query_result(objective(out, y, *inputs), out, skip_aux=False)
            return Gradient(input_gradient(total, x, query).contiguous(), value, out)

    def script(self, x: Tensor) -> bool:
        """Use TorchScript for forward passes without a gradient on a CPU; return if it can.

        The trace must agree with the copy on images of another batch size. A trace that may depend
        on the values of the images, as the tracer's warnings tell, is not used.
        """
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", TracerWarning)
            try:
                traced = torch.jit.trace(self.net, _contiguous_copy(x[:2]), check_trace=False)
                scripted = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
                expected = self(x).logits
                self._scripted = scripted
                error = (self(x).logits - expected).abs().amax()
                agrees = bool(error <= SCRIPT_TOLERANCE * expected.abs().amax())
            except Exception:  # of the tracer or of the user's code
                agrees = False
        if not agrees:
            self._scripted = None
        return agrees


def _contiguous_copy(x: Tensor) -> Tensor:
    """Return the images for the TorchScript; channels-last ones take it longer (oneDNN)."""
    return x.clone(memory_format=torch.contiguous_format)


class Bf16Norms(TorchFunctionMode):
    """Compute layer norm, group norm and RMS norm in bf16 inside the block, without autocast.

    Their kernels take and return bf16; means and variances are fp32 all the same.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in NORMS:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, Tensor.bfloat16, (args, kwargs or {}))
        with no_autocast(self.device):
            return func(*args, **kwargs)


def pure_bf16_pays(net: nn.Module) -> bool:
    """Return whether there are other parameters than of convolutions, linear layers, batch norm."""
    others = (nn.Conv2d, nn.Linear, _NormBase)
    modules = [module for module in net.modules() if not isinstance(module, others)]
    return any(True for module in modules for _ in module.parameters(recurse=False))


def check_copyable(model: Model) -> nn.Module:
    """Return the model, or raise CannotCopy if a copy could differ from it."""
    if not isinstance(model, nn.Module):
        raise CannotCopy("it is not an nn.Module")
    modules = list(model.modules())
    if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        raise CannotCopy("it is a TorchScript module")
    if _has_any_global_hook() or any(getattr(m, name, None) for m in modules for name in HOOKS):
        raise CannotCopy("it has hooks")
    norms = [m for m in modules if isinstance(m, _NormBase) and not isinstance(m, _InstanceNorm)]
    if any(norm.training or norm.running_mean is None for norm in norms):
        raise CannotCopy("its batch norm uses the statistics of the batch")
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors):
        raise CannotCopy("its weights are not all float32")
    if len({t.device for t in tensors}) > 1:
        raise CannotCopy("it lies on several devices")
    return model


def _folded_copy(model: nn.Module, x: Tensor) -> tuple[nn.Module, int]:
    """Return a frozen copy with folded batch norm, and how many of them are folded."""
    net = _copied(model)
    out, calls = _trace(net, x)
    pairs = _conv_norm_pairs(calls)
    if not pairs:
        return net, 0
    for conv, norm in pairs:
        _fold(net, conv, norm)
    before, after = as_output(out).logits, as_output(_trace(net, x)[0]).logits
    if bool((before - after).abs().amax() <= FOLD_TOLERANCE * before.abs().amax()):
        return net, len(pairs)
    return _copied(model), 0  # what lies between a convolution and its norm is changed or read


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the module with frozen weights, on one device."""
    try:
        net = copy.deepcopy(model)
    except Exception as error:
        raise CannotCopy(f"copy.deepcopy fails: {error}") from error
    while isinstance(net, PARALLEL):
        net = net.module
    for name, module in list(net.named_modules()):
        if isinstance(module, PARALLEL):
            replace_module(net, name, module.module)
    return net.requires_grad_(False)


def _trace(net: nn.Module, x: Tensor) -> tuple[Any, list[Call]]:
    """Return the output of a forward pass in fp32 and the calls of layers, in order."""
    calls: list[Call] = []

    def after(module: nn.Module, args: tuple[Tensor, ...], returned: Tensor) -> None:
        if args:  # not given by keyword
            calls.append(Call(module, args[0], returned))

    layers = [m for m in net.modules() if type(m) in (nn.Conv2d, nn.Linear, nn.BatchNorm2d)]
    handles = [m.register_forward_hook(after) for m in layers]
    try:
        with torch.no_grad(), tf32("fp32"), no_autocast(x.device):
            out = net(x.clone())
    finally:
        for handle in handles:
            handle.remove()
    return out, calls


def _conv_norm_pairs(calls: list[Call]) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Return convolutions whose output goes to a batch norm, both called once."""
    times = Counter(call.module for call in calls)
    convs = {id(call.returned): call for call in calls if isinstance(call.module, nn.Conv2d)}
    pairs = []
    for call in calls:
        source = convs.get(id(call.given))
        if not isinstance(call.module, nn.BatchNorm2d) or source is None:
            continue
        if times[call.module] == times[source.module] == 1:
            assert isinstance(source.module, nn.Conv2d)
            pairs.append((source.module, call.module))
    return pairs


def _fold(net: nn.Module, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Put the affine map of a batch norm in eval mode into the convolution before it."""
    scale, shift = norm_coefficients(norm)
    if conv.bias is not None:
        shift = shift + conv.bias.double() * scale
    _set_weight(conv, (conv.weight.double() * scale[:, None, None, None]).float())
    conv.bias = nn.Parameter(shift.float(), requires_grad=False)
    name = next(name for name, module in net.named_modules() if module is norm)
    replace_module(net, name, nn.Identity())


def _set_weight(layer: nn.Conv2d | nn.Linear, weight: Tensor) -> None:
    """Set a new parameter: another layer may share the old one."""
    layer.weight = nn.Parameter(weight, requires_grad=False)


def _cast(layer: nn.Conv2d | nn.Linear, settings: CopySettings) -> None:
    """Convert the weights once to what autocast would convert them to in every pass."""
    dtype = products_dtype(settings.precision)
    last = layer.weight.ndim == 4 and settings.channels_last
    layout = torch.channels_last if last else torch.preserve_format
    _set_weight(layer, layer.weight.to(dtype, memory_format=layout))
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)


def _cast_parameters(net: nn.Module, heads: set[nn.Conv2d | nn.Linear]) -> None:
    """Convert all parameters but those of heads and batch norm to bf16; buffers are left alone.

    Buffers may be the mean and standard deviation of pixels, which are subtracted in fp32.
    """
    for module in net.modules():
        if module in heads or isinstance(module, _NormBase):
            continue
        for name, value in list(module.named_parameters(recurse=False)):
            if value.dtype == torch.float32:
                setattr(module, name, nn.Parameter(value.bfloat16(), requires_grad=False))


def _run_in_fp32(layer: nn.Module) -> None:
    """Compute a layer that returns logits in fp32: in bf16 many images would have equal ones."""
    own_forward = layer.forward

    def forward(x: Tensor) -> Any:
        with no_autocast(x.device):
            return own_forward(x.float())

    layer.forward = forward


def _pad_channels(conv: nn.Conv2d) -> None:
    """Pad few input channels with zeros; a GPU convolution of three channels is slow."""
    if conv.groups != 1 or conv.padding_mode != "zeros":
        return
    extra = (0, 0, 0, 0, 0, MIN_CHANNELS - conv.in_channels)
    _set_weight(conv, pad(conv.weight, extra))
    own_forward = conv.forward
    conv.forward = lambda input: own_forward(pad(input, extra))  # type: ignore[method-assign]
