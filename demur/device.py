"""Choosing a device by name, and its arithmetic."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from demur.errors import BadInput


def device_named(name: str) -> torch.device:
    """The torch device for auto, cpu, cuda or cuda:1."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"no device is called {name!r}; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"demur does not run on {name!r}; use auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"{name} was asked for but this machine shows none; use --device cpu")
    return device


@contextmanager
def full_precision() -> Iterator[None]:
    """Real fp32 for a while: no TF32 in convolutions and matrix products on a GPU."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before
