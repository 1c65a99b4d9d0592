"""Which code this is, down to the last byte, known without loading any library."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

import demur


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
