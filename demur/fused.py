"""Mark short chains of tensor operations that torch.compile may fuse into one kernel.

    @fused
    def step(self, x, x_adv, grad, length): ...

Inside `with fusing():` a marked function runs compiled. Anywhere else it runs as written, so the
results of the plain engine never depend on a compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_depth = 0  # nested fusing() blocks around the running code


@contextmanager
def fusing(enabled: bool = True) -> Iterator[None]:
    """Run marked functions compiled inside this block; do nothing if not enabled."""
    global _depth  # noqa: PLW0603
    _depth += enabled
    try:
        yield
    finally:
        _depth -= enabled


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs compiled inside `fusing()`."""
    compiled: list[Callable[P, R]] = []

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _depth == 0:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return wrapped
