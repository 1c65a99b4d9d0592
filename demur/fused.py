"""Short chains of tensor operations that a compiler may turn into one kernel.

    @fused
    def step(self, x, x_adv, grad, length): ...

Inside `with fusing():` a marked function runs compiled; anywhere else it is the function itself,
so plain results never depend on a compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_depth = 0  # of fusing() blocks around the code that runs


@contextmanager
def fusing(wanted: bool = True) -> Iterator[None]:
    """Compile marked functions for a while, if wanted."""
    global _depth  # noqa: PLW0603
    _depth += wanted
    try:
        yield
    finally:
        _depth -= wanted


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled where somebody asked for it."""
    compiled: list[Callable[P, R]] = []

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _depth == 0:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return wrapped
