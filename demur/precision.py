"""The arithmetic of convolutions and matrix products; losses and verdicts never fall below fp32.

    with arithmetic("bf16", device): ...

fp64 and fp32 are what they say, tf32 rounds the factors of products on a GPU, bf16 does too and
computes convolutions in 16 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["fp64", "fp32", "tf32", "bf16"]


def weights_dtype(precision: Precision) -> torch.dtype:
    """In what the weights are held and changed."""
    return torch.float64 if precision == "fp64" else torch.float32


def products_dtype(precision: Precision) -> torch.dtype:
    """In what the factors of convolutions are held."""
    return torch.bfloat16 if precision == "bf16" else weights_dtype(precision)


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Convolutions in bf16 for a while, where that is the precision."""
    # the cache would keep casts of weights from one step of a captured graph to the next
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


def no_autocast(device: torch.device) -> torch.autocast:
    """No lowering for a while: for what is never computed in 16 bits, and for backward passes."""
    return torch.autocast(device.type, enabled=False)


@contextmanager
def tf32(precision: Precision) -> Iterator[None]:
    """The factors of fp32 products rounded to TF32 for a while, or not, by the precision."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = precision in ("tf32", "bf16")
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


@contextmanager
def use_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """This precision and no other for a while."""
    with tf32(precision), autocast(precision, device):
        yield
