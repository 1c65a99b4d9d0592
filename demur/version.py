"""The version of the running code, computed without importing any other library."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

import demur


@cache
def code_version() -> str:
    """Return release, commit (in a git checkout) and a hash of the package's files."""
    package = Path(demur.__file__).parent
    source_hash = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".j2", ".css"):
            source_hash.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    commit = _commit(package)
    return f"{demur.__version__}+{commit + '.' if commit else ''}src{source_hash.hexdigest()[:12]}"


def _commit(package: Path) -> str:
    """The commit of the checkout; empty outside a checkout of demur or without git."""
    if not (package.parent / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(package.parent), "rev-parse", "--short=12", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "g" + result.stdout.strip() if result.returncode == 0 else ""
