"""How tensor operations are computed: device, precision, compiled chains; and checks for NaN.

"tf32" rounds the factors of fp32 products to TF32 on a GPU. "bf16" computes convolutions in bf16 by
autocast, and the remaining fp32 products with TF32. Heads, losses and scores use fp32 at least.
Values that are not numbers raise BadInput before they become a decision or a step: NaN compares as
false, so without a check an image whose score is NaN would count as robust.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from demur.errors import BadInput, bad_input

Precision = Literal["fp64", "fp32", "tf32", "bf16"]
P = ParamSpec("P")
R = TypeVar("R")

_fusing_depth = 0  # nested fusing() blocks around the running code


def weights_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the weights and of their updates."""
    return torch.float64 if precision == "fp64" else torch.float32


def products_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of the inputs and weights of convolutions."""
    return torch.bfloat16 if precision == "bf16" else weights_dtype(precision)


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return a context in which convolutions run in bf16, if that is the precision."""
    # the cache would carry weight casts from one step of a captured CUDA graph to the next
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


def no_autocast(device: torch.device) -> torch.autocast:
    """Return a context without autocast, for heads, losses and backward passes."""
    return torch.autocast(device.type, enabled=False)


@contextmanager
def tf32(precision: Precision) -> Iterator[None]:
    """Allow TF32 in convolutions and matrix products for "tf32" and "bf16", else forbid it."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = precision in ("tf32", "bf16")
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


@contextmanager
def use_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set TF32 and autocast for a precision."""
    with tf32(precision), autocast(precision, device):
        yield


def device_by_name(name: str) -> torch.device:
    """Return the torch device for auto, cpu, cuda or cuda:N; auto prefers a GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with bad_input(f"there is no device {name!r}; use --device auto, cpu or cuda", (RuntimeError,)):
        device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise BadInput(
            f"demur does not support the device {name!r}; use --device auto, cpu or cuda"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"this machine has no device {name}; use --device cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton kernels and CUDA graphs use the current device
    return device


@contextmanager
def fusing(enabled: bool = True) -> Iterator[None]:
    """Run marked functions compiled inside this block; do nothing if not enabled."""
    global _fusing_depth  # noqa: PLW0603
    _fusing_depth += enabled
    try:
        yield
    finally:
        _fusing_depth -= enabled


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a short chain of tensor operations so that it runs compiled inside `fusing()`.

    Anywhere else it runs as written, so the results of the plain engine depend on no compiler.
    """
    compiled: list[Callable[P, R]] = []

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _fusing_depth == 0:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return wrapped


COUNT_EVERY = 50  # calls whose values wait, so that a step of an attack launches no more kernels


@dataclass
class Check:
    """The deferred checks of one kind of value."""

    images: int  # in the largest batch so far
    remedy: str
    invalid: Callable[[Tensor], Tensor]
    waiting: list[Tensor] = field(default_factory=list)  # values that were not counted yet
    worst: Tensor | None = None  # the largest number of invalid values in one call, on the device

    def add(self, values: Tensor) -> None:
        """Let the values of one call wait; a view is copied, since its base may change."""
        copied = values._is_view() or values.is_inference()
        self.waiting.append(values.detach().clone() if copied else values.detach())
        if len(self.waiting) >= COUNT_EVERY:
            self.count()

    def count(self) -> None:
        """Count the invalid values of all calls that wait."""
        calls = defaultdict[object, list[Tensor]](list)
        for values in self.waiting:
            calls[values.shape, values.dtype, values.device].append(values)
        self.waiting.clear()
        for same in calls.values():
            worst = self.invalid(torch.stack(same)).sum(1).amax()
            self.worst = worst if self.worst is None else torch.maximum(self.worst, worst)


_deferred: ContextVar[dict[str, Check] | None] = ContextVar("deferred checks", default=None)


def raise_if_invalid(
    what: str, values: Tensor, remedy: str, invalid: Callable[[Tensor], Tensor] = torch.isnan
) -> None:
    """Raise BadInput if any of N values, one per image, is invalid; perhaps at the end of a block.

    Inside `deferred_checks` only the first call for a kind of value (`what`), and for the largest
    batch, waits for the device. `remedy` is what the user can do, as the end of the sentence.
    """
    checks = _deferred.get()
    check = None if checks is None else checks.get(what)
    if check is not None and check.images >= len(values):
        check.add(values)
        return
    _raise_if_any(what, int(invalid(values).sum()), len(values), remedy)
    if check is not None:
        check.images = len(values)
    elif checks is not None:
        checks[what] = Check(len(values), remedy, invalid)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Collect the checks of a block, so that no step waits for the device; raise at its end."""
    if _deferred.get() is not None:  # the outer block raises
        yield
        return
    token = _deferred.set({})
    try:
        yield
        raise_deferred()
    finally:
        _deferred.reset(token)


def raise_deferred() -> None:
    """Raise BadInput if a check that is deferred so far has found an invalid value."""
    for what, check in (_deferred.get() or {}).items():
        check.count()
        if check.worst is not None:
            _raise_if_any(what, int(check.worst), check.images, check.remedy)


def _raise_if_any(what: str, number: int, images: int, remedy: str) -> None:
    if number:
        owner = "rejector" if what.endswith("score") else "model"
        verb = "are" if what.endswith("s") else "is"
        raise BadInput(
            f"the {owner}'s {what} {verb} not a number for {number} of {images} images; {remedy}"
        )
