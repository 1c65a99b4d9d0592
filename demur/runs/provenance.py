"""Provenance of a result: versions of code and libraries, and the device."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from demur.version import code_version

LIBRARIES = ("numpy", "safetensors", "scikit-learn")


def provenance(device: torch.device) -> dict[str, str | int]:
    """Code version, library versions, device and number of threads, by name."""
    return {
        "code": code_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with the build, since results depend on it
        **{name: _installed_version(name) for name in LIBRARIES},
        "device": _device_description(device),
        "threads": torch.get_num_threads(),
    }


def _installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _device_description(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()})"
