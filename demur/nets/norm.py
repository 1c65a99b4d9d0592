"""Batch norm whose statistics may be those of the batch of all processes together.

share_statistics(net)       # from now on, in train mode, under torchrun

Our own sums over processes, so it runs wherever they can talk: torch's SyncBatchNorm needs GPUs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from demur import distributed


class Norm2d(nn.BatchNorm2d):
    """Batch norm of maps."""

    shared = False

    def forward(self, x: Tensor) -> Tensor:
        """The normalised maps."""
        return _by_the_batch(self, x) if _apart(self) else super().forward(x)


class Norm1d(nn.BatchNorm1d):
    """Batch norm of features."""

    shared = False

    def forward(self, x: Tensor) -> Tensor:
        """The normalised features."""
        return _by_the_batch(self, x) if _apart(self) else super().forward(x)


def synchronise_batch_norm(net: nn.Module) -> None:
    """Let every batch norm of a net see the batch of all processes."""
    for module in net.modules():
        if isinstance(module, Norm1d | Norm2d):
            module.shared = True


def _apart(norm: Norm1d | Norm2d) -> bool:
    """Whether torch's own batch norm would not do."""
    return norm.training and (norm.momentum == 0 or _asked(norm))


def _asked(norm: Norm1d | Norm2d) -> bool:
    return norm.shared and distributed.current().size > 1


def _by_the_batch(norm: Norm1d | Norm2d, x: Tensor) -> Tensor:
    if _asked(norm):
        return _over_all_processes(norm, x)
    # with momentum 0 nothing is remembered, so that a compiler may leave out what nobody looks at
    return batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def _over_all_processes(norm: Norm1d | Norm2d, x: Tensor) -> Tensor:
    """As torch's batch norm in train mode, of all processes' images."""
    over = [d for d in range(x.ndim) if d != 1]
    wide = x.to(norm.weight.dtype)
    count = _summed(wide.new_full((), x.numel() / x.shape[1]))
    mean = _summed(wide.sum(over)) / count
    away = wide - _per_channel(mean, x)
    variance = _summed((away * away).sum(over)) / count
    if norm.momentum != 0:
        _remember(norm, mean, variance * count / (count - 1))
    scale = norm.weight * (variance + norm.eps).rsqrt()
    return (away * _per_channel(scale, x) + _per_channel(norm.bias, x)).to(x.dtype)


@torch.no_grad()
def _remember(norm: Norm1d | Norm2d, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics."""
    keep = norm.momentum
    assert keep is not None and norm.num_batches_tracked is not None
    norm.get_buffer("running_mean").lerp_(mean, keep)
    norm.get_buffer("running_var").lerp_(variance, keep)
    norm.num_batches_tracked.add_(1)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *([1] * (x.ndim - 2)))


def _summed(values: Tensor) -> Tensor:
    total: Tensor = _Summed.apply(values)  # type: ignore[no-untyped-call]
    return total


class _Summed(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total
