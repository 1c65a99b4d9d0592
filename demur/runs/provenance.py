"""Where a number comes from: code, libraries and machine, written into every result."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from demur.version import code_version

LIBRARIES = ("numpy", "safetensors", "scikit-learn")


def provenance(device: torch.device) -> dict[str, str | int]:
    """Code version, library versions and device, as flat text."""
    return {
        "code": code_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build, on which weights depend
        **{name: _installed(name) for name in LIBRARIES},
        "device": _device_words(device),
        "threads": torch.get_num_threads(),
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _device_words(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()})"
