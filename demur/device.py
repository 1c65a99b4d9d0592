"""Selection of a torch device by name."""

import torch

from demur.errors import BadInput


def device_by_name(name: str) -> torch.device:
    """Return the torch device for auto, cpu, cuda or cuda:N; auto prefers a GPU.

    Raises:
        BadInput: The name is no device, or this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"there is no device {name!r}; use --device auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(
            f"demur does not support the device {name!r}; use --device auto, cpu or cuda"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"this machine has no device {name}; use --device cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton kernels and CUDA graphs use the current device
    return device
