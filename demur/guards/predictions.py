"""Predictions for image files: which files are meant, and tables as CSV, JSON or Parquet.

The answers of finished parts lie beside the table until it is complete, so that the same call
resumes. A part is used again for the same guard and for files of the same size and time.
"""

import csv
import glob
import hashlib
import importlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from demur.data.sources import files_below
from demur.errors import BadInput, import_optional
from demur.files.checked_files import exclusive_lock, write_bytes, write_text
from demur.files.output_paths import IMAGE_SUFFIXES, is_stream
from demur.guards.core import Guard
from demur.guards.inputs import Batch, read_images
from demur.progress import ignore

Row = dict[str, Any]  # file, what `GuardResult.rows` has, error, guard
PART = 64  # files
FIRST, LAST = ("file", "class", "label", "accepted", "confidence"), ("reason", "error", "guard")
TYPES = {"label": "int64", "accepted": "bool", "confidence": "float64"}  # others: text, or a score


def find_images(words: Sequence[str]) -> list[Path]:
    """Return the files that paths, folders and globs name, sorted within each, without repeats.

    A folder stands for every image file below it. BadInput names a word that matches nothing.
    """
    found: dict[Path, None] = {}
    for word in words:
        path = Path(word)
        if path.is_dir():
            below = files_below(path)
            matches = [p for p in below if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()]
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


def write_predictions(
    guard: Guard, paths: Sequence[Path], out: Path | None,
    on_progress: Callable[[int, int], None] = ignore, rejected: Path | None = None,
    as_json: bool = False, on_error: Callable[[str], None] = ignore,
) -> Counter[str]:  # fmt: skip
    """Write a row per file, with a column per score; count accepted, rejected, unreadable files.

    The suffix of a path is the format of its table, unless all are JSON; None is standard output,
    as CSV. A second table holds the rejected and unreadable files only. `on_error` is called with
    what is wrong with each unreadable file.
    """
    tables = {out: False} if rejected is None else {out: False, rejected: True}
    suffixes = _formats(tables, ".json" if as_json else "")
    counts, names = Counter[str](), [part.name for part in guard.scores]
    with ExitStack() as stack:
        if out is None or is_stream(out):
            folder = Path(stack.enter_context(TemporaryDirectory()))
        else:
            folder = out.resolve().with_name(f"{out.name}.parts")
            stack.enter_context(exclusive_lock(folder))
        parts = []
        for start in range(0, len(paths), PART):
            parts.append(_finished_part(guard, paths[start : start + PART], folder, start))
            rows = _rows(parts[-1])
            for row in rows:
                read = "accepted" if row["accepted"] else "rejected"
                counts["unreadable" if row["error"] else read] += 1
                if row["error"]:
                    on_error(row["error"])
            on_progress(start + len(rows), len(paths))
        half = folder / "table"
        for path, only_rejections in tables.items():
            found = chain.from_iterable(map(_rows, parts))
            chosen = (row for row in found if not (only_rejections and row["accepted"]))
            _write_table(half, suffixes[path], chosen, names)
            if path is None:
                sys.stdout.write(half.read_text("utf-8"))
            elif is_stream(path):
                write_bytes(path, half.read_bytes())
            else:
                shutil.move(half, path.resolve())
        shutil.rmtree(folder)
        folder.mkdir()  # TemporaryDirectory and the lock delete it
    with suppress(OSError):
        folder.rmdir()
    return counts


def _finished_part(guard: Guard, paths: Sequence[Path], folder: Path, start: int) -> Path:
    """The file with the answers for some images, made unless it is there."""
    part = folder / f"{start:09d}-{_key(guard, paths)}.json"
    if not part.exists():
        write_text(part, json.dumps(predict_files(guard, paths)))
    return part


def _rows(part: Path) -> list[Row]:
    rows: list[Row] = json.loads(part.read_bytes())
    return rows


def _key(guard: Guard, paths: Iterable[Path]) -> str:
    """Digest of the guard and of the names, sizes and times of files."""
    hasher = hashlib.sha256(guard.identity.encode("utf-8", "surrogateescape"))
    for path in paths:
        state = path.stat() if path.exists() else None
        hasher.update(repr((str(path), state and (state.st_size, state.st_mtime_ns))).encode())
    return hasher.hexdigest()[:16]


def _formats(paths: Iterable[Path | None], fixed: str) -> dict[Path | None, str]:
    """Return the suffix of each table, or a fixed one; raise BadInput if it names no format."""
    suffixes = {path: fixed or (path.suffix.lower() if path else ".csv") for path in paths}
    for path, suffix in suffixes.items():
        if suffix not in ("", ".csv", ".txt", ".json", ".parquet"):
            raise BadInput(f"{path} is no .csv, .json or .parquet file; name one")
    if ".parquet" in suffixes.values():
        import_optional("pyarrow", "Parquet needs pyarrow", "pyarrow, or write .csv")
    return suffixes


def _write_table(path: Path, suffix: str, rows: Iterator[Row], names: Sequence[str]) -> None:
    if suffix == ".parquet":
        _write_parquet(path, rows, names)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if suffix == ".json":
            for number, row in enumerate(rows):
                file.write(",\n  " if number else "[\n  ")
                json.dump(row, file, ensure_ascii=False)
            file.write("\n]\n" if file.tell() else "[\n]\n")
        else:
            table = csv.DictWriter(file, (*FIRST, *names, *LAST), lineterminator="\n")
            table.writeheader()
            table.writerows(_flat(row, names) for row in rows)


def _write_parquet(path: Path, rows: Iterator[Row], names: Sequence[str]) -> None:
    pa, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    kinds = TYPES | dict.fromkeys(names, "float64")
    schema = pa.schema([(n, kinds.get(n, "string")) for n in (*FIRST, *names, *LAST)])
    with parquet.ParquetWriter(path, schema) as table:
        while some := [_flat(row, names) for row in islice(rows, PART)]:
            table.write_table(pa.Table.from_pylist(some, schema))


def _flat(row: Row, names: Sequence[str]) -> Row:
    """Return a row with a value per column instead of a dictionary of scores."""
    scores = row["scores"] or {}
    return (
        {name: row[name] for name in FIRST}
        | {name: scores.get(name) for name in names}
        | {name: row[name] for name in LAST}
    )


def predict_files(guard: Guard, paths: Sequence[Path]) -> list[Row]:
    """Return one row per file, in order; a file that cannot be read has an `error`."""
    batches = [_read(guard, path) for path in paths]
    read = [batch for batch in batches if isinstance(batch, Batch)]
    answers: Iterator[Row] = iter(())
    if read:
        result = guard.decide(torch.cat([one.x for one in read]), [one.notes[0] for one in read])
        answers = iter(result.rows())
    none = dict.fromkeys(("class", "label", "accepted", "confidence", "scores", "reason"))
    return [
        {"file": _shown(path), **none, "error": batch, "guard": guard.identity}
        if isinstance(batch, str)
        else {"file": _shown(path), **next(answers), "error": None, "guard": guard.identity}
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
