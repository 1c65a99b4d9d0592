"""The processes that work on one job: one by default, several under torchrun.

    torchrun --nproc-per-node 4 -m demur train cifar10-pgdat-rr

Process 0 leads: it alone writes. Every process holds the same weights and takes its part of each
batch. gloo carries tensors between CPUs, nccl between GPUs.
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
    """This process's place among all of them."""

    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def shard(self, items: Tensor) -> Tensor:
        """This process's share of a batch; shares differ by one item at most."""
        return items.tensor_split(self.size)[self.rank]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in one message."""
        if self.size == 1 or not tensors:
            return
        whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(whole)
        for tensor, part in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the leading process."""
        for tensor in tensors if self.size > 1 else ():
            held = tensor.detach().contiguous()  # a message has no layout
            dist.broadcast(held, 0)
            tensor.detach().copy_(held)

    def broadcast(self, thing: T) -> T:
        """What the leading process says; its word is small and plain."""
        if self.size == 1:
            return thing
        words = [thing]
        dist.broadcast_object_list(words, 0)
        return words[0]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """To the leading process, one tensor of the same shape from each; none to the others."""
        if self.size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_leader else None
        dist.gather(tensor, parts, dst=0)
        return parts or []

    def barrier(self) -> None:
        """Go on when every process has come this far."""
        if self.size > 1:
            dist.barrier()


def current() -> ProcessGroup:
    """The world this process has joined, or one of its own."""
    if dist.is_available() and dist.is_initialized():
        return ProcessGroup(dist.get_rank(), dist.get_world_size())
    return ProcessGroup()


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def init_distributed(device: torch.device) -> Iterator[torch.device]:
    """Join the processes torchrun started; the device that belongs to this one."""
    if not launched() or dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise BadInput(
                f"torchrun started more processes than this machine's {torch.cuda.device_count()} "
                "GPUs; lower --nproc-per-node"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    yield device
    dist.destroy_process_group()  # not after an error: it would wait for processes that wait too
