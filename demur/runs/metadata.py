"""JSON metadata files of a run, checked for damage and for missing keys.

metadata = read_metadata(run.path / "checkpoint.json", remedy)
metadata["weights"]      # BadInput names the file and the key if the key is missing
"""

from pathlib import Path
from typing import Any

from demur.errors import BadInput
from demur.runs.files import read_json


class Metadata(dict[str, Any]):
    """A dictionary that raises BadInput with the name of its file if a key is missing."""

    def __init__(self, path: Path, values: dict[str, Any], remedy: str) -> None:
        super().__init__(values)
        self.path, self.remedy = path, remedy

    def __missing__(self, key: str) -> Any:
        raise BadInput(f"{self.path} is damaged: the key {key!r} is missing; {self.remedy}")

    def __or__(self, more: dict[str, Any]) -> "Metadata":  # type: ignore[override]
        return Metadata(self.path, super().__or__(more), self.remedy)


def read_metadata(path: Path, remedy: str) -> Metadata:
    """Metadata of a JSON file, after its digest is checked."""
    return Metadata(path, read_json(path, remedy), remedy)
