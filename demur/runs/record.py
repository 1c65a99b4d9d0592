"""A record: what a net answered to every image of one attack, and where that came from.

    record.output          # logits, features, aux as an Output
    record.correct         # N, bool
    record.about["spec"]   # the attack as text

Attacks cost hours, scores cost seconds: every rejector, metric and figure reads records.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZipFile, ZipInfo

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demur.errors import BadInput
from demur.output import Output, prediction
from demur.runs.files import move, read_checked, write_bytes, write_json
from demur.runs.metadata import read_metadata

MEND = "restore it, or delete it and make it again with demur attack where the weights are"


@dataclass(frozen=True)
class Record:
    """Per-image arrays in data-set order, and the record's own story."""

    arrays: dict[str, Tensor]
    metadata: dict[str, Any]

    @property
    def label(self) -> str:
        """The attack as the user named it."""
        return str(self.metadata["label"])

    @property
    def digest(self) -> str:
        """The digest of what was asked: attack, thresholds, weights, data, count."""
        return str(self.metadata["digest"])

    @property
    def y(self) -> Tensor:
        """The true labels."""
        return self.arrays["y"]

    @property
    def scores_only(self) -> bool:
        """Whether scores are all that is left of the net's answers."""
        return "logits" not in self.arrays

    @property
    def output(self) -> Output:
        """The net's answers; features have width 0 unless they were kept."""
        if self.scores_only:
            raise BadInput(
                f"of {self.label} only scores were kept ({', '.join(self.kept)}), and this needs "
                "the net's answers; train the recipe again and attack it for those"
            )
        logits = self.arrays["logits"]
        none = logits.new_zeros(len(logits), 0)
        return Output(logits, self.arrays.get("feature", none), self.arrays["aux"])

    @property
    def kept(self) -> dict[str, Tensor]:
        """Scores worked out before features or answers were dropped, by their rejector's text."""
        names = self.metadata.get("scores", [])
        return dict(zip(names, self.arrays["scores"], strict=True)) if names else {}

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Which answers are right."""
        if self.scores_only:
            return self.arrays["correct"].numpy()
        return (prediction(self.output) == self.y).numpy()


def record_path(folder: Path, label: str, split: str, digest: str) -> Path:
    """Where a record of this attack on this split lives."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", label)[:80]  # what every file system takes
    return folder / f"{name}-{split}-{digest[:12]}.npz"


def write_record(path: Path, record: Record, tight: bool = False) -> None:
    """Put arrays and story in place; the story is written last and makes the record count.

    A tight one takes longer to write, and a sixth less room.
    """
    file_digest = write_bytes(path, _packed(record.arrays, ZIP_LZMA if tight else ZIP_DEFLATED))
    write_json(path.with_suffix(".json"), record.metadata | {"file_digest": file_digest})


def _packed(arrays: Mapping[str, Tensor], compression: int) -> bytes:
    """The arrays as numpy's npz file; the same arrays are the same bytes at any time."""
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as file:
        for name, values in arrays.items():
            part = io.BytesIO()
            np.lib.format.write_array(part, values.numpy(), allow_pickle=False)
            file.writestr(ZipInfo(f"{name}.npy"), part.getvalue(), compression)
    return buffer.getvalue()


def move_record(path: Path, folder: Path) -> None:
    """Put a whole record into another folder; the story goes last here too."""
    for part in (path, path.with_suffix(".json")):
        move(part, folder)


def read_record(path: Path) -> Record:
    """The record at path, after checking its digest; BadInput when it is damaged."""
    told = path.with_suffix(".json")
    about = read_metadata(told, MEND)
    if not path.is_file():
        raise BadInput(
            f"{path} is missing, though {told.name} tells of it; restore it, or delete {told.name} "
            "and make the record again with demur attack where the weights are"
        )
    content = io.BytesIO(read_checked(path, about["file_digest"], MEND))
    with np.load(content, allow_pickle=False) as arrays:
        return Record({name: torch.from_numpy(arrays[name]) for name in arrays.files}, about)


def finished_record(folder: Path, split: str, digest: str) -> Path | None:
    """Where a record of exactly this was finished, under whatever name."""
    for path in folder.glob(f"*-{split}-{digest[:12]}.npz"):
        if path.with_suffix(".json").is_file():
            return path
    return None


def identity(**parts: Any) -> str:
    """64 hex digits over named parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
