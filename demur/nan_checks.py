"""Values that are not numbers raise BadInput before they become a decision or a step.

    raise_if_invalid("score", score.isnan(), remedy)      # one boolean per image
    with deferred_checks():                     # counts on the device, read at the end

NaN compares as false, so without a check an image whose score is NaN would count as robust.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from demur.errors import BadInput


@dataclass
class Count:
    """The largest number of images with an invalid value in one call, on the device."""

    worst: Tensor
    images: int
    remedy: str


_counts: ContextVar[dict[str, Count] | None] = ContextVar("invalid values", default=None)


def raise_if_invalid(what: str, invalid: Tensor, remedy: str) -> None:
    """Raise BadInput if any value is invalid; inside `deferred_checks` perhaps at its end.

    There only the first call for a kind of value, and for the largest batch, waits for the device.

    Args:
        what: The kind of value: "logits", "score", "gradient" or "objective".
        invalid: Which images have an invalid value, N, bool.
        remedy: What the user can do, as the end of the sentence.
    """
    counts, count = _counts.get(), Count(invalid.sum(), len(invalid), remedy)
    if counts is not None and what in counts and counts[what].images >= count.images:
        counts[what].worst = torch.maximum(counts[what].worst, count.worst)
        return
    _raise_if_any(what, count)
    if counts is not None:
        counts[what] = count if what not in counts else replace(counts[what], images=count.images)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Collect the checks of a block, so that no step waits for the device; raise at its end."""
    if _counts.get() is not None:  # the outer block raises
        yield
        return
    token = _counts.set({})
    try:
        yield
        raise_deferred()
    finally:
        _counts.reset(token)


def raise_deferred() -> None:
    """Raise BadInput if a check that is deferred so far has found an invalid value."""
    for what, count in (_counts.get() or {}).items():
        _raise_if_any(what, count)


def _raise_if_any(what: str, count: Count) -> None:
    if number := int(count.worst):
        verb = "are" if what.endswith("s") else "is"
        raise BadInput(
            f"the model's {what} {verb} not a number for {number} of {count.images} images; "
            f"{count.remedy}"
        )
