"""The batch-norm mode of a net while its training images are attacked.

train   normalise by batch statistics; every forward pass of the attack updates the running ones
batch   normalise by batch statistics; the attack leaves the running ones unchanged
eval    normalise by the running statistics
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from torch import nn

from demur.attacks import Attack
from demur.errors import BadInput
from demur.gradient import attack_model

BatchNorm = Literal["train", "batch", "eval"]


@contextmanager
def attack_mode(net: nn.Module, bn: BatchNorm) -> Iterator[None]:
    """Put `net` into a batch-norm mode with frozen parameters, and restore both on exit."""
    was_training, trainable = net.training, [p for p in net.parameters() if p.requires_grad]
    net.train(bn != "eval")
    for parameter in trainable:
        parameter.requires_grad_(False)  # an attack needs gradients of pixels only
    try:
        with running_stats_frozen(net) if bn == "batch" else nullcontext():
            yield
    finally:
        net.train(was_training)
        for parameter in trainable:
            parameter.requires_grad_(True)


def check_keeps_batch(attack: Attack, bn: BatchNorm) -> None:
    """Raise BadInput if `attack` drops images while batch norm uses batch statistics."""
    if bn != "eval" and getattr(attack, "keep", "") == "success":
        raise BadInput(
            "an attack with keep=success drops images from the batch, which changes the batch "
            f"statistics that bn={bn} normalises by; use bn=eval or keep=max_objective"
        )


@contextmanager
def running_stats_frozen(net: nn.Module) -> Iterator[None]:
    """Set the momentum of every batch norm to 0, so that running statistics do not change."""
    norms = attack_model(net).batch_norms()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
