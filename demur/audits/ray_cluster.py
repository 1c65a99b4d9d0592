"""Audits on a Ray cluster: each block of images goes to a worker that holds the model.

with cluster("ray://head:10001"):
    report = demur.audit(net, x, y)
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from demur.attacks import AttackBatch
from demur.attacks.attack_model import Model, checked
from demur.attacks.autoattack import Chain, ChainState
from demur.audits.ensemble_state import PROGRESS
from demur.engine import accelerated
from demur.errors import BadInput, bad_input, first_line, import_optional
from demur.numerics import raise_deferred

RETRIES = 3  # of a worker that dies
SECONDS = 5.0  # to wait for the head node
FIRST_IMAGES = 64  # test the copy of the model on a GPU
RAY: ContextVar[Any] = ContextVar("ray", default=None)  # the module while a cluster is in use


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Attack with the ensembles of the block on a Ray cluster.

    A worker takes one GPU where the cluster has GPUs, else one core. On cores the model is queried
    as it is, with one thread: unless the model is random, results are those of engine="plain" in
    one process, bit by bit. The block of a worker that dies is attacked again. What runs once
    (clean images, checks, the student of a masked model, worst-score) runs in this process.

    Args:
        address: "ray://HOST:PORT", "HOST:PORT" of the head node, or "auto": that of the variable
            RAY_ADDRESS, else the cores or GPUs of this machine. None attacks in this process.
    """
    if address is None:
        yield
        return
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    ray = import_optional("ray", "a cluster needs Ray", "'demur[cluster]'")
    own = not ray.is_initialized()
    if own:
        _connect(ray, address)
    token = RAY.set(ray)
    try:
        yield
    finally:
        RAY.reset(token)
        if own:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "local")
    try:
        if address != "local":  # Ray itself tries for minutes
            at = urlsplit(address if "://" in address else f"//{address}")
            socket.create_connection((at.hostname, at.port), SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise BadInput(
            f"no Ray cluster answers at {address!r}: {first_line(error)}; give auto, HOST:PORT of "
            "a head node, or ray://HOST:PORT; set RAY_AUTH_MODE=token if it asks for a token"
        ) from None


class Worker:
    """Holds the model of an evaluation on one GPU or core, ready to attack blocks of images."""

    def __init__(
        self, model: Model, chain: Chain, x: Tensor, y: Tensor, bs: int, device: str
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        self.chain, self.device, self.stack = chain, torch.device(device), ExitStack()
        model = model.to(device) if isinstance(model, nn.Module) else model
        given = self.stack.enter_context(checked(model, x.to(device), y.to(device)))
        engine = "auto" if device == "cuda" else "plain"
        self.model = self.stack.enter_context(accelerated(*given, bs, engine))

    def advance(
        self, member: int, rows: Tensor, block: list[Tensor], state: ChainState
    ) -> tuple[Tensor, ChainState]:
        """Run one attack on images with labels and positions; return their state afterwards."""
        x, y, index = (part.to(self.device) for part in block)
        state = state.each(lambda part: part.to(self.device))
        batch, every = AttackBatch(self.model, x, y, index, None), torch.arange(len(x)).to(y)
        self.chain.advance(member, every, batch, state, stream=0)
        raise_deferred()
        return rows, state.each(Tensor.cpu)


class Workers:
    """The workers of one evaluation, on as many GPUs or cores as it has blocks for."""

    def __init__(self, chain: Chain, model: Model, batch: AttackBatch, bs: int) -> None:
        self.ray, self.batch = RAY.get(), batch
        found = self.ray.cluster_resources()
        device = "cuda" if found.get("GPU", 0) >= 1 else "cpu"
        most = int(found.get("GPU" if device == "cuda" else "CPU", 0))
        first = [part[:FIRST_IMAGES].cpu() for part in (batch.x, batch.y)]
        with bad_input("the model cannot be sent to a cluster", (TypeError,)):
            self.given = [self.ray.put(part) for part in (model, chain, *first)]
        worker = self.ray.remote(
            num_cpus=1, num_gpus=int(device == "cuda"), max_restarts=RETRIES,
            max_task_retries=RETRIES,
        )(Worker)  # fmt: skip
        count = max(1, min(most, -(-len(batch.x) // bs)))
        self.actors = [worker.remote(*self.given, bs, device) for _ in range(count)]
        self.pool = import_module("ray.util").ActorPool(self.actors)

    def advance(
        self, member: int, blocks: Sequence[Tensor], chain_state: ChainState
    ) -> Iterator[Tensor]:
        """Run one attack on blocks of rows; yield the rows of each when its state is stored."""

        def start(actor: Any, rows: Tensor) -> Any:
            block = [part[rows].cpu() for part in (self.batch.x, self.batch.y, self.batch.index)]
            state = chain_state.each(lambda part: part[rows].cpu())
            return actor.advance.remote(member, rows.cpu(), block, state)

        errors = self.ray.exceptions
        try:
            for done, state in self.pool.map_unordered(start, blocks):
                rows = done.to(self.batch.y)
                for name in PROGRESS:
                    own = getattr(chain_state, name)
                    own[rows] = getattr(state, name).to(own)
                yield rows
        except errors.RayTaskError as error:  # of the attack or the model
            raise error.cause from None
        except errors.RayError as error:
            raise BadInput(
                f"a block of images failed with {RETRIES + 1} workers of the cluster "
                f"({first_line(error)}); give more memory to a worker, or smaller batches"
            ) from None

    def close(self) -> None:
        """End the workers."""
        for actor in self.actors:
            self.ray.kill(actor)
