"""Sums, batch norm, biases and ReLU of any net that torch.fx can trace, as one kernel each.

`fuse_activations` replaces ReLU(norm(a + b)), with a + b kept for a shortcut, ReLU(conv(u) + bias)
and ReLU(conv(u) + conv(v) + biases). Alone, each operation reads and writes all maps.
"""

import copy
import operator
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.functional import relu

from demur.engine import fused_norm
from demur.engine.fused_norm import FusedAffine
from demur.numerics import no_autocast, tf32
from demur.output import as_output

LOGIT_TOLERANCE = 1e-3  # of the largest logit, in fp32
MIN_COSINE = 0.999  # of the gradients of a fused net and its net
ADDITIONS = (operator.add, operator.iadd, torch.add)
RELUS = (relu, torch.relu, torch.relu_)


class FusedActivation(nn.Module):
    """ReLU(scale * (a + b) + shift) of maps N, C, H, W; a call returns a + b and the active maps.

    Without `keep_sum` the call returns something undefined for a + b, and the scale must be 1.
    """

    coefficients: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, keep_sum: bool) -> None:
        super().__init__()
        self.keep_sum = keep_sum
        self.register_buffer("coefficients", torch.stack((scale, shift)).float())

    def forward(self, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if a.is_cuda and fused_norm.AVAILABLE and (b is None or a.dtype == b.dtype):
            return FusedAffine(self.coefficients, self.keep_sum)(a, b)
        total = a if b is None else a + b
        scale, shift = self.coefficients[:, :, None, None]
        return total, relu(total * scale + shift).to(total.dtype)


class Pattern(NamedTuple):
    """A ReLU with the operations before it that one kernel computes."""

    relu: fx.Node
    norm: fx.Node | None
    addition: fx.Node | None
    summands: tuple[fx.Node, ...]


def fuse_activations(net: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy with fused activations, or the net itself if there is no faithful one.

    The net is in eval mode with frozen weights. On the images x the copy must agree with it.
    """
    try:
        # torch.fx does not see control flow, nor changes in place: the result is compared below
        fused = fx.symbolic_trace(copy.deepcopy(net))
        if not _fuse_all(fused, x):
            return net
        with tf32("fp32"), no_autocast(x.device):
            (logits, grad), (own_logits, own_grad) = (_query(m, x) for m in (net, fused))
    except Exception:  # of the tracer, of the user's code, or of a backward pass
        return net
    same_logits = (logits - own_logits).abs().amax() <= LOGIT_TOLERANCE * logits.abs().amax()
    cosine = torch.cosine_similarity(grad.flatten(), own_grad.flatten(), 0)
    return fused if bool(same_logits & (cosine >= MIN_COSINE)) else net


@torch.enable_grad()
def _query(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits, and the gradient of the sum of their squares."""
    x = x.detach().clone(memory_format=torch.channels_last).requires_grad_()
    logits = as_output(net(x.clone()), len(x)).logits
    (grad,) = torch.autograd.grad(logits.square().sum(), x)
    return logits.detach(), grad


def _fuse_all(traced: fx.GraphModule, x: Tensor) -> int:
    """Fuse the activations of a traced net in place; return their number."""
    _drop_identities(traced)
    with torch.no_grad():
        ShapeProp(traced).propagate(x.clone())
    count = 0
    for node in [node for node in traced.graph.nodes if _is_relu(traced, node)]:
        if pattern := _pattern(traced, node):
            _fuse(traced, pattern, f"fused_activation_{count}")
            count += 1
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return count


def _drop_identities(traced: fx.GraphModule) -> None:
    """Remove modules that return what they are given: folded norms and dropout in eval mode."""
    for node in list(traced.graph.nodes):
        module = _module(traced, node)
        if isinstance(module, nn.Identity) or (
            isinstance(module, nn.Dropout | nn.Dropout2d) and not module.training
        ):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _module(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_relu(traced: fx.GraphModule, node: fx.Node) -> bool:
    by_function = node.op == "call_function" and node.target in RELUS
    by_method = node.op == "call_method" and node.target in ("relu", "relu_")
    return by_function or by_method or type(_module(traced, node)) is nn.ReLU


def _is_addition(node: fx.Node) -> bool:
    by_function = node.op == "call_function" and node.target in ADDITIONS
    by_method = node.op == "call_method" and node.target in ("add", "add_")
    return (by_function or by_method) and len(node.args) == 2 and not node.kwargs


def _pattern(traced: fx.GraphModule, node: fx.Node) -> Pattern | None:
    """Return what can be fused into this ReLU, or None."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or _shape(source) is None:
        return None
    norm = None
    if type(_module(traced, source)) is nn.BatchNorm2d and _only_user(source):
        norm = source
        source = norm.args[0] if norm.args else None
        if not isinstance(source, fx.Node):
            return None
    if _is_addition(source) and _can_sum(source, norm is None):
        a, b = source.args
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        return Pattern(node, norm, source, (a, b))
    if norm is None and not _only_user(source):
        return None  # ReLU in place would change what another node reads
    if norm is None and not _movable_bias(traced, source):
        return None  # a ReLU alone
    return Pattern(node, norm, None, (source,))


def _shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of maps N, C, H, W, or None for everything else."""
    found = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    shape = getattr(found, "shape", None)
    return tuple(shape) if shape is not None and len(shape) == 4 else None


def _only_user(node: fx.Node) -> bool:
    return len(node.users) == 1


def _can_sum(addition: fx.Node, only: bool) -> bool:
    """Return whether the kernel can compute this sum, which with `only` the ReLU alone reads.

    An addition in place must not change what another node reads.
    """
    a, b = addition.args
    if _shape(a) is None or _shape(a) != _shape(b) or a is b:
        return False
    in_place = addition.target in (operator.iadd, "add_")
    assert isinstance(a, fx.Node)
    return not (in_place and not _only_user(a)) and (not only or _only_user(addition))


def _movable_bias(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the node is a convolution with a bias that only the kernel reads."""
    conv = _module(traced, node)
    if type(conv) is not nn.Conv2d or conv.bias is None or not _only_user(node):
        return False
    calls = Counter(
        id(module) for other in traced.graph.nodes if (module := _module(traced, other)) is not None
    )
    return calls[id(conv)] == 1


def _fuse(traced: fx.GraphModule, pattern: Pattern, name: str) -> None:
    """Replace the nodes of a pattern by one call."""
    scale, shift = _scale_and_shift(traced, pattern)
    traced.add_submodule(name, FusedActivation(scale, shift, keep_sum=pattern.norm is not None))
    graph = traced.graph
    with graph.inserting_before(pattern.addition or pattern.relu):
        fused = graph.call_module(name, pattern.summands)
        active = graph.call_function(operator.getitem, (fused, 1))
        total = graph.call_function(operator.getitem, (fused, 0))
    active.meta, total.meta = pattern.relu.meta, pattern.summands[0].meta
    pattern.relu.replace_all_uses_with(active)
    graph.erase_node(pattern.relu)
    if pattern.norm is not None:
        graph.erase_node(pattern.norm)
    if pattern.addition is not None:
        pattern.addition.replace_all_uses_with(total)
        graph.erase_node(pattern.addition)


def _scale_and_shift(traced: fx.GraphModule, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Return the coefficients of each channel; biases of convolutions move into the shift."""
    shape = _shape(pattern.summands[0])
    assert shape is not None
    device = next(iter(traced.parameters())).device
    scale = torch.ones(shape[1], dtype=torch.float64, device=device)
    shift = torch.zeros_like(scale)
    if pattern.norm is not None:
        norm = _module(traced, pattern.norm)
        assert isinstance(norm, nn.BatchNorm2d)
        scale, shift = norm_coefficients(norm)
    if pattern.addition is None or _only_user(pattern.addition):
        for summand in pattern.summands:
            if _movable_bias(traced, summand):
                conv = _module(traced, summand)
                assert isinstance(conv, nn.Conv2d) and conv.bias is not None
                shift = shift + scale * conv.bias.double()
                conv.bias = None
    return scale, shift


def norm_coefficients(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a batch norm in eval mode, C each, in float64."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift + norm.bias.double() if norm.affine else shift
