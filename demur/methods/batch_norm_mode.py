"""The mode a net is in while images are crafted for it to learn from."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from demur.attacks import Attack
from demur.errors import BadInput

BatchNorm = Literal["train", "batch", "eval"]


@contextmanager
def crafting(net: nn.Module, bn: BatchNorm) -> Iterator[None]:
    """The net in a batch-norm mode and with its weights held still, then as it was."""
    mode, learning = net.training, [p for p in net.parameters() if p.requires_grad]
    net.train(bn != "eval")
    for parameter in learning:
        parameter.requires_grad_(False)  # no gradient is computed for what no attack may change
    try:
        with running_stats_frozen(net) if bn == "batch" else nullcontext():
            yield
        _of_stand_in(net, "remember")
    finally:
        net.train(mode)
        for parameter in learning:
            parameter.requires_grad_(True)


def check_keeps_batch(attack: Attack, bn: BatchNorm) -> None:
    """Refuse an attack that drops images while batch norm goes by the batch."""
    if bn != "eval" and getattr(attack, "keep", "") == "success":
        raise BadInput(
            "an attack with keep=success drops images from the batch, which batch norm by "
            "its statistics would feel; use bn=eval or keep=max_objective"
        )


@contextmanager
def running_stats_frozen(net: nn.Module) -> Iterator[None]:
    """Batch norm by the batch's statistics, of which nothing is remembered."""
    norms = _batch_norms(net)
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def _batch_norms(net: nn.Module) -> list[_BatchNorm]:
    """Those of a net, or those that an engine's stand-in for it names."""
    named: list[_BatchNorm] | None = _of_stand_in(net, "batch_norms")
    own = (module for module in net.modules() if isinstance(module, _BatchNorm))
    return list(own) if named is None else named


def _of_stand_in(net: nn.Module, name: str) -> Any:
    """What a method answers that only an engine's stand-in for a net has."""
    method = getattr(net, name, None)
    return None if method is None else method()
