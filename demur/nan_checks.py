"""Values that are not numbers raise BadInput before they become a decision or a step.

NaN compares as false, so without a check an image whose score is NaN would count as robust.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demur.errors import BadInput

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
        verb = "are" if what.endswith("s") else "is"
        raise BadInput(
            f"the model's {what} {verb} not a number for {number} of {images} images; {remedy}"
        )
