"""Work recorded once as a CUDA graph and replayed without a word from the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
WARM_UP = 3  # times before recording, in which kernels are compiled and chosen


def capture(
    work: Callable[[], R], prepare: Callable[[], object] = lambda: None, tune: bool = True
) -> tuple[torch.cuda.CUDAGraph, R]:
    """The graph of some work and what it returns, at addresses that every replay fills anew.

    `prepare` is done before each of the trials and before the recording, and is no part of it.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    try:
        with tuned(tune), torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                prepare()
                work()
    finally:
        torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.empty_cache()  # a graph has memory of its own
    prepare()
    graph = torch.cuda.CUDAGraph()
    try:
        with tuned(tune), torch.cuda.graph(graph):
            made = work()
    except RuntimeError as error:  # ending a recording that ran out of memory fails too
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise
    return graph, made


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class CapturedGraph(Generic[R]):
    """recording(a, b) is function(a, b), recorded at the first call, for one shape of each."""

    def __init__(self, function: Callable[..., R], *examples: Tensor, tune: bool) -> None:
        self.inputs = [example.clone() for example in examples]
        self.graph, self.made = capture(lambda: function(*self.inputs), tune=tune)

    def __call__(self, *inputs: Tensor) -> R:
        """What the function makes of the inputs, until the next call; unused rows stay behind."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own[: len(given)].copy_(given)
        self.graph.replay()
        return self.made


@contextmanager
def tuned(wanted: bool) -> Iterator[None]:
    """Let the convolution library try its kernels and keep the fastest, or not."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
