"""CUDA graph capture and replay.

A replay launches all kernels of a function with one call from the host. It runs the kernels that
were captured on the same addresses, so it computes what the function computes, for inputs of the
captured shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
WARM_UP = 3  # calls before the capture, in which kernels are compiled and chosen


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


def first_line(error: Exception) -> str:
    """Return the first line of an error message, or the type of the error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
