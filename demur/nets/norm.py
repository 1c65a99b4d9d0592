"""Batch norm with optional synchronisation over processes.

    synchronise_batch_norm(net)     # train mode under torchrun uses statistics of all processes

The all-reduce is ours, so it also works between CPUs; torch's SyncBatchNorm needs GPUs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from demur import distributed


class Norm2d(nn.BatchNorm2d):
    """Batch norm of maps N, C, H, W; `synchronised` uses the statistics of all processes."""

    synchronised = False

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(self, x) if _needs_own_forward(self) else super().forward(x)


class Norm1d(nn.BatchNorm1d):
    """Batch norm of features N, C; `synchronised` uses the statistics of all processes."""

    synchronised = False

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(self, x) if _needs_own_forward(self) else super().forward(x)


def synchronise_batch_norm(net: nn.Module) -> None:
    """Make every batch norm of a net normalise by the statistics of all processes."""
    for module in net.modules():
        if isinstance(module, Norm1d | Norm2d):
            module.synchronised = True


def _needs_own_forward(norm: Norm1d | Norm2d) -> bool:
    """Return whether torch's batch norm is not enough."""
    return norm.training and (norm.momentum == 0 or _spans_processes(norm))


def _spans_processes(norm: Norm1d | Norm2d) -> bool:
    return norm.synchronised and distributed.current().size > 1


def _normalise(norm: Norm1d | Norm2d, x: Tensor) -> Tensor:
    if _spans_processes(norm):
        return _normalise_over_processes(norm, x)
    # momentum 0 updates no running statistics; without them torch.compile can drop unused outputs
    return batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def _normalise_over_processes(norm: Norm1d | Norm2d, x: Tensor) -> Tensor:
    """Apply batch norm in train mode with the statistics of all processes' images."""
    dims = [d for d in range(x.ndim) if d != 1]
    wide = x.to(norm.weight.dtype)
    count = _all_reduce_sum(wide.new_full((), x.numel() / x.shape[1]))
    mean = _all_reduce_sum(wide.sum(dims)) / count
    centred = wide - _per_channel(mean, x)
    variance = _all_reduce_sum((centred * centred).sum(dims)) / count
    if norm.momentum != 0:
        _update_running_statistics(norm, mean, variance * count / (count - 1))
    scale = norm.weight * (variance + norm.eps).rsqrt()
    return (centred * _per_channel(scale, x) + _per_channel(norm.bias, x)).to(x.dtype)


@torch.no_grad()
def _update_running_statistics(norm: Norm1d | Norm2d, mean: Tensor, variance: Tensor) -> None:
    momentum = norm.momentum
    assert momentum is not None and norm.num_batches_tracked is not None
    norm.get_buffer("running_mean").lerp_(mean, momentum)
    norm.get_buffer("running_var").lerp_(variance, momentum)
    norm.num_batches_tracked.add_(1)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *([1] * (x.ndim - 2)))


def _all_reduce_sum(values: Tensor) -> Tensor:
    total: Tensor = _AllReduceSum.apply(values)  # type: ignore[no-untyped-call]
    return total


class _AllReduceSum(torch.autograd.Function):
    """Sum over processes; the gradient is the sum of the processes' gradients."""

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
