"""Choosing a device by name."""

import torch

from demur.errors import BadInput


def device_by_name(name: str) -> torch.device:
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
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and graphs go to the current one
    return device
