"""CUDA graph capture and replay, the batch sizes that graphs are captured for, and their cache.

A replay launches all kernels of a function with one call from the host, on the addresses of the
capture. Attacks pad their batches to a few sizes (buckets), so that few graphs cover all batch
sizes; in eval mode padding changes no other row.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from demur.attacks.attack_model import Gradient, ObjectiveFunction
from demur.engine.copies import Query, QueryFunction
from demur.errors import first_line
from demur.output import Output

R = TypeVar("R")
WARM_UP = 3  # calls before the capture, in which kernels are compiled and chosen
MIN_BUCKET = 16  # images; a smaller batch takes as long
MAX_RATIO = 64  # largest bucket divided by smallest bucket
GRANULARITY = 16  # a tuned bucket is a multiple of this many images
CAPTURE_COST = 60.0  # cost of a tuned capture, in replays at the coarse size
UNTUNED_OVERHEAD = 0.07  # share of a replay lost to kernels picked without cuDNN benchmark


def capture(
    work: Callable[[], R], prepare: Callable[[], object] = lambda: None, tune: bool = True
) -> tuple[torch.cuda.CUDAGraph, R]:
    """Return the CUDA graph of `work` and its result, which every replay overwrites in place.

    `prepare` runs before each warm-up call and before the capture; it is not captured. `tune`
    turns cuDNN benchmark on. Raises torch.OutOfMemoryError if the device memory is exhausted.
    """
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    try:
        with cudnn_benchmark(tune), torch.cuda.stream(side_stream):
            for _ in range(WARM_UP):
                prepare()
                work()
    finally:
        torch.cuda.current_stream().wait_stream(side_stream)
    torch.cuda.empty_cache()  # a graph allocates from a memory pool of its own
    prepare()
    graph = torch.cuda.CUDAGraph()
    try:
        with cudnn_benchmark(tune), torch.cuda.graph(graph):
            result = work()
    except RuntimeError as error:  # ending a capture that ran out of memory fails too
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise
    return graph, result


class CapturedGraph(Generic[R]):
    """A function captured at construction for the shapes of `examples`; a call replays it."""

    def __init__(self, function: Callable[..., R], *examples: Tensor, tune: bool) -> None:
        self.inputs = [example.clone() for example in examples]
        self.graph, self.result = capture(lambda: function(*self.inputs), tune=tune)

    def __call__(self, *inputs: Tensor) -> R:
        """Replay and return the result, valid until the next call.

        An input may have fewer rows than its example; the other rows keep earlier values.
        """
        for static, given in zip(self.inputs, inputs, strict=True):
            static[: len(given)].copy_(given)
        self.graph.replay()
        return self.result


@contextmanager
def cudnn_benchmark(enabled: bool) -> Iterator[None]:
    """Set cuDNN benchmark, which times the convolution kernels and keeps the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Bucket(NamedTuple):
    """A padded batch size, and whether its graph is captured with cuDNN benchmark."""

    size: int
    tuned: bool


class BatchBuckets:
    """Choose buckets for batches of at most `largest` images, for each kind of work separately.

    A tuned graph (tight size, cuDNN benchmark) is slow to capture; padding and untuned kernels are
    slow to replay. With `tune_later`, capture a tuned graph only after padding has wasted as much
    time as the capture costs (the ski-rental rule: at most twice the optimum). Without it every
    bucket is coarse and tuned: if each size needs its own torch.compile, another size never pays.
    """

    def __init__(self, largest: int, tune_later: bool) -> None:
        self.largest, self.tune_later = largest, tune_later
        self.wasted: defaultdict[Hashable, float] = defaultdict(float)  # in replays, by kind
        self.tuned: set[tuple[Hashable, int]] = set()

    def bucket_for(self, kind: Hashable, count: int) -> Bucket:
        """Return the bucket for `count` images; a batch above `largest` keeps its size."""
        coarse = self.coarse_size(count)
        if not self.tune_later:
            return Bucket(coarse, True)
        tight = min(-(-max(count, 1) // GRANULARITY) * GRANULARITY, coarse)
        if (kind, tight) not in self.tuned:
            self.wasted[kind] += 1 - (1 - UNTUNED_OVERHEAD) * tight / coarse
            if self.wasted[kind] < CAPTURE_COST:
                return Bucket(coarse, False)
            self.tuned.add((kind, tight))
            self.wasted[kind] = 0
        return Bucket(tight, True)

    def coarse_size(self, count: int) -> int:
        """Return the smallest of largest / 2**k and 3/4 of that which holds `count` images."""
        if count > self.largest:
            return count
        count = max(count, 1)
        bucket, least = self.largest, max(count, MIN_BUCKET, self.largest // MAX_RATIO)
        while bucket // 2 >= least:
            bucket //= 2
        return smaller if (smaller := 3 * bucket // 4) >= least else bucket

    def reset(self) -> None:
        """Start again with coarse buckets, after all captured graphs were dropped."""
        self.wasted.clear()
        self.tuned.clear()


def pad_batch(batch: Tensor, bucket: int) -> Tensor:
    """Append zeros to a batch up to `bucket` rows."""
    if len(batch) == bucket:
        return batch
    return torch.cat([batch, batch.new_zeros(bucket - len(batch), *batch.shape[1:])])


class QueryGraphs:
    """The CUDA graphs of a copy's queries: one for each objective, kind of query and bucket.

    On a GPU a batch is padded to its bucket and the graph is replayed; an objective that cannot be
    compiled or captured runs eagerly (`eager`), and `on_message` is called with a sentence. On a
    CPU a query is padded only. Until `set_max_batch`, batches keep their size and nothing is
    captured. With `eager_without_memory` an objective also runs eagerly if its graph does not fit
    into memory; otherwise torch.OutOfMemoryError is raised.
    """

    def __init__(
        self, on_message: Callable[[str], None], tune_later: bool = True,
        eager_without_memory: bool = False,
    ) -> None:  # fmt: skip
        self.on_message, self.tune_later = on_message, tune_later
        self.eager_without_memory = eager_without_memory
        self.buckets: BatchBuckets | None = None
        self.captured: dict[tuple[ObjectiveFunction, Query, Bucket], CapturedGraph[Gradient]] = {}
        self.eager: set[ObjectiveFunction] = set()

    def __call__(
        self, compute: QueryFunction, objective: ObjectiveFunction, query: Query, *tensors: Tensor
    ) -> Gradient:
        if self.buckets is None:
            return compute(objective, query, *tensors)
        count = len(tensors[0])
        bucket = self.buckets.bucket_for((objective, query), count)
        if objective in self.eager or not tensors[0].is_cuda:
            padded = (pad_batch(part, bucket.size) for part in tensors)
            grad, value, out = compute(objective, query, *padded)
        else:
            grad, value, out = self._replay(compute, objective, query, bucket, *tensors)
        return Gradient(  # copies, since the next replay overwrites its results
            grad[:count].clone(), value[:count].clone(),
            Output(*(part[:count].clone() for part in out)),
        )  # fmt: skip

    def _replay(
        self, compute: QueryFunction, objective: ObjectiveFunction, query: Query, bucket: Bucket,
        *tensors: Tensor,
    ) -> Gradient:  # fmt: skip
        """Replay the graph of a query, captured on first use; run it eagerly if that fails."""
        memory_is_short = False
        try:
            key = (objective, query, bucket)
            if key not in self.captured:
                padded = (pad_batch(part, bucket.size) for part in tensors)
                untuned = (objective, query, bucket._replace(tuned=False))
                self.captured.pop(untuned, None)  # frees its memory
                function = partial(compute, objective, query)
                self.captured[key] = CapturedGraph(function, *padded, tune=bucket.tuned)
            return self.captured[key](*tensors)
        except torch.OutOfMemoryError:
            if not self.eager_without_memory:
                raise
            message = "the GPU memory is too small for CUDA graphs; use a smaller batch size"
            memory_is_short = True
        except Exception as error:  # from torch.compile or the capture
            message = f"cannot compile this objective, attacking it eagerly: {first_line(error)}"
        self.eager.add(objective)
        self.on_message(message)
        if memory_is_short:  # not in the except clause, whose traceback holds tensors
            self.captured.clear()
            torch.cuda.empty_cache()
        return compute(objective, query, *tensors)

    def set_max_batch(self, largest: int) -> None:
        """Set the largest batch size; a new size drops all captured graphs."""
        if self.buckets is None or largest != self.buckets.largest:
            self.buckets = BatchBuckets(largest, self.tune_later)
            self.captured.clear()

    def drop_if_memory_is_short(self) -> None:
        """Drop the graphs if they fill half of the memory: later batches use them."""
        if self.captured and self.buckets is not None:
            free, total = torch.cuda.mem_get_info()
            if free < total / 2:
                self.captured.clear()
                self.buckets.reset()
