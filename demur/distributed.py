"""Data-parallel processes: one by default, several under torchrun.

Rank 0 is the leader and the only process that writes files. Every rank holds the same weights and
computes on its shard of each batch. The backend is gloo on CPUs and NCCL on GPUs.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from demur.errors import BadInput

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process and the number of all processes (the world size)."""

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def shard(self, items: Tensor) -> Tensor:
        """Return this rank's contiguous part of a batch; the parts differ by one item at most."""
        return items.tensor_split(self.size)[self.rank]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors in place by their sums over all processes, with one all-reduce."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors in place by those of rank 0."""
        for tensor in tensors if self.size > 1 else ():
            contiguous = tensor.detach().contiguous()  # broadcast ignores strides
            dist.broadcast(contiguous, 0)
            tensor.detach().copy_(contiguous)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0, a small object that can be pickled."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of one shape, on rank 0, and an empty list elsewhere."""
        if self.size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_leader else None
        dist.gather(tensor, parts, dst=0)
        return parts or []

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def current() -> ProcessGroup:
    """Return the process group of this process, or one of size 1 without torchrun."""
    if dist.is_available() and dist.is_initialized():
        return ProcessGroup(dist.get_rank(), dist.get_world_size())
    return ProcessGroup()


def launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def init_distributed(device: torch.device) -> Iterator[torch.device]:
    """Join the process group of torchrun and yield the device of this rank.

    Without torchrun it yields `device`. Raises BadInput if there are more processes than GPUs.
    """
    if not launched() or dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            raise BadInput(
                f"torchrun started more processes than this machine's {torch.cuda.device_count()} "
                "GPUs; lower --nproc-per-node"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    yield device
    dist.destroy_process_group()  # not after an error: it would wait for blocked processes
