"""What a JSON file of a run tells, checked for damage, and for what it ought to tell.

story = told_in(run.path / "checkpoint.json", mend)
story["weights"]      # BadInput, where it is missing, names the file and the key
"""

from pathlib import Path
from typing import Any

from demur.errors import BadInput
from demur.runs.files import read_json


class Metadata(dict[str, Any]):
    """A story that names its file when asked for what it does not tell."""

    def __init__(self, path: Path, told: dict[str, Any], mend: str) -> None:
        super().__init__(told)
        self.path, self.mend = path, mend

    def __missing__(self, key: str) -> Any:
        raise BadInput(f"{self.path} is damaged: it does not tell {key!r}; {self.mend}")

    def __or__(self, more: dict[str, Any]) -> "Metadata":  # type: ignore[override]
        return Metadata(self.path, super().__or__(more), self.mend)


def read_metadata(path: Path, mend: str) -> Metadata:
    """The story in a file, after checking the digest it carries."""
    return Metadata(path, read_json(path, mend), mend)
