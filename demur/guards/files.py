"""Predictions for image files: which files are meant, and the answers as CSV or JSON."""

import csv
import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from demur.errors import BadInput
from demur.files.atomic import raise_unreadable
from demur.files.output_paths import SUFFIXES
from demur.guards.core import Guard
from demur.guards.inputs import Batch, read_images
from demur.progress import ignore

Row = dict[str, Any]  # file, class, label, accepted, confidence, scores, reason, error
FILES_PER_BATCH = 64
COLUMNS = ("file", "class", "label", "accepted", "confidence", "reason", "error")


def find_images(words: Sequence[str]) -> list[Path]:
    """Return the files that paths, folders and globs name, sorted within each, without repeats.

    A folder stands for every image file below it. BadInput names a word that matches nothing.
    """
    found: dict[Path, None] = {}
    for word in words:
        path = Path(word)
        if path.is_dir():
            below = (
                Path(place, name)
                for place, _, names in os.walk(path, onerror=raise_unreadable)
                for name in names
            )
            matches = sorted(p for p in below if p.suffix.lower() in SUFFIXES and p.is_file())
        elif path.exists():
            matches = [path]
        else:
            # Path.glob takes no absolute pattern
            matches = [Path(p) for p in sorted(glob.glob(word, recursive=True))]  # noqa: PTH207
            matches = [p for p in matches if p.is_file()]
        if not matches:
            raise BadInput(f"{word} names no image; give a file, a folder of images or a glob")
        found |= dict.fromkeys(matches)
    return list(found)


def predict_files(
    guard: Guard, paths: Sequence[Path], on_progress: Callable[[int, int], None] = ignore
) -> list[Row]:
    """Return one row per file, in order; a file that cannot be read has an `error`."""
    rows: list[Row] = []
    for start in range(0, len(paths), FILES_PER_BATCH):
        rows += _predict_some(guard, paths[start : start + FILES_PER_BATCH])
        on_progress(len(rows), len(paths))
    return rows


def _predict_some(guard: Guard, paths: Sequence[Path]) -> list[Row]:
    batches = [_read(guard, path) for path in paths]
    read = [batch for batch in batches if isinstance(batch, Batch)]
    answers: Iterator[Row] = iter(())
    if read:
        result = guard.decide(torch.cat([one.x for one in read]), [one.notes[0] for one in read])
        answers = iter(result.rows())
    none = dict.fromkeys(("class", "label", "accepted", "confidence", "scores", "reason"))
    return [
        {"file": _shown(path), **none, "error": batch}
        if isinstance(batch, str)
        else {"file": _shown(path), **next(answers), "error": None}
        for path, batch in zip(paths, batches, strict=True)
    ]


def _shown(path: Path) -> str:
    """The path as text that can be written, also if its name is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _read(guard: Guard, path: Path) -> Batch | str:
    try:
        return read_images(path, guard.shape, guard.resize)
    except BadInput as error:
        text = str(error).replace(str(path), _shown(path))
        return text if _shown(path) in text else f"{_shown(path)}: {text}"
    except OSError as error:
        return f"{_shown(path)}: {(error.strerror or 'cannot be read').lower()}"


def to_json(rows: Sequence[Row]) -> str:
    """Return the rows as a JSON list."""
    return json.dumps(list(rows), indent=2, ensure_ascii=False) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, with one column per score."""
    names = list(dict.fromkeys(name for row in rows for name in row["scores"] or {}))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS[:5], *names, *COLUMNS[5:]])
    for row in rows:
        scores = row["scores"] or {}
        values = [row[column] for column in COLUMNS]
        writer.writerow([*values[:5], *(scores.get(name) for name in names), *values[5:]])
    return text.getvalue()
