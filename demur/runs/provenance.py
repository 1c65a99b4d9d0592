"""Where a number comes from: code, libraries and machine, written into every result."""

import hashlib
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import demur

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


@cache
def code_version() -> str:
    """The release, the commit where there is one, and a hash of the package's own files."""
    package = Path(demur.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".j2", ".css"):
            whole.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    commit = _commit(package)
    return f"{demur.__version__}+{commit + '.' if commit else ''}src{whole.hexdigest()[:12]}"


def _commit(package: Path) -> str:
    """The checkout's commit, empty outside a checkout of demur or without git."""
    if not (package.parent / ".git").exists():
        return ""
    try:
        asked = ["git", "-C", str(package.parent), "rev-parse", "--short=12", "HEAD"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "g" + answer.stdout.strip() if answer.returncode == 0 else ""


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _device_words(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()})"
