"""Tables of predictions as CSV, JSON or Parquet, for more files than fit into memory.

    counts = write_predictions(guard, paths, Path("answers.parquet"), rejected=Path("look.csv"))

The answers of finished parts lie beside the table until it is complete, so that the same call
resumes. A part is used again for the same guard and for files of the same size and time.
"""

import csv
import hashlib
import importlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from demur.errors import import_optional
from demur.files.atomic import exclusive_lock, write_bytes, write_text
from demur.files.output_paths import is_stream
from demur.guards.core import Guard
from demur.guards.files import Row, predict_files
from demur.progress import ignore

PART = 256  # files
FIRST, LAST = ("file", "class", "label", "accepted", "confidence"), ("reason", "error", "guard")
TYPES = {"label": "int64", "accepted": "bool", "confidence": "float64"}  # others: text, or a score


def write_predictions(
    guard: Guard,
    paths: Sequence[Path],
    out: Path | None,
    on_progress: Callable[[int, int], None] = ignore,
    rejected: Path | None = None,
    as_json: bool = False,
    on_error: Callable[[str], None] = ignore,
) -> Counter[str]:
    """Write a row per file to a .csv, .json or .parquet file, with a column per score.

    Args:
        guard: The guard.
        paths: Image files.
        out: The table; its suffix is its format. None is standard output, as CSV.
        on_progress: Called with the number of finished files and of all.
        rejected: A second table, of the rejected and unreadable files only.
        as_json: Write JSON whatever the suffix.
        on_error: Called with what is wrong with each unreadable file.

    Returns:
        The numbers of accepted, rejected and unreadable files.
    """
    counts, names = Counter[str](), [part.name for part in guard.scores]
    tables = [out] if rejected is None else [out, rejected]
    with ExitStack() as stack:
        if out is None or is_stream(out):
            folder = Path(stack.enter_context(TemporaryDirectory()))
        else:
            folder = out.resolve().with_name(f"{out.name}.parts")
            stack.enter_context(exclusive_lock(folder))
        halves = [folder / name for name in ("all", "rejected")[: len(tables)]]
        with ExitStack() as writing:
            writers = []
            for half, path in zip(halves, tables, strict=True):
                suffix = ".json" if as_json else path.suffix.lower() if path else ".csv"
                writers.append(writing.enter_context(_table(half, suffix, names)))
            for rows in _finished_parts(guard, paths, folder, on_progress):
                counts.update(map(_outcome, rows))
                for write, some in zip(writers, (rows, rejections(rows)), strict=False):
                    write(some)
                for row in rows:
                    if row["error"]:
                        on_error(row["error"])
        for half, path in zip(halves, tables, strict=True):
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


def rejections(rows: list[Row]) -> list[Row]:
    """Return the rows of rejected and unreadable files."""
    return [row for row in rows if not row["accepted"]]


def _outcome(row: Row) -> str:
    return "unreadable" if row["error"] else "accepted" if row["accepted"] else "rejected"


def _finished_parts(
    guard: Guard, paths: Sequence[Path], folder: Path, on_progress: Callable[[int, int], None]
) -> Iterator[list[Row]]:
    for start in range(0, len(paths), PART):
        some = paths[start : start + PART]
        part = folder / f"{start:09d}-{_key(guard, some)}.json"
        if not part.exists():
            write_text(part, json.dumps(predict_files(guard, some)))
        on_progress(start + len(some), len(paths))
        yield json.loads(part.read_bytes())


def _key(guard: Guard, paths: Iterable[Path]) -> str:
    """Digest of the guard and of the names, sizes and times of files."""
    hasher = hashlib.sha256(guard.identity.encode("utf-8", "surrogateescape"))
    for path in paths:
        state = path.stat() if path.exists() else None
        hasher.update(repr((str(path), state and (state.st_size, state.st_mtime_ns))).encode())
    return hasher.hexdigest()[:16]


def flat(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """Return a row with a value per column instead of a dictionary of scores."""
    scores = row["scores"] or {}
    return (
        {name: row[name] for name in FIRST}
        | {name: scores.get(name) for name in names}
        | {name: row[name] for name in LAST}
    )


@contextmanager
def _table(path: Path, suffix: str, names: Sequence[str]) -> Iterator[Callable[[list[Row]], None]]:
    """Open a table and yield the function that appends rows."""
    if suffix == ".parquet":
        pa = import_optional("pyarrow", "Parquet needs pyarrow", "pyarrow, or write .csv")
        parquet = importlib.import_module("pyarrow.parquet")
        kinds = TYPES | dict.fromkeys(names, "float64")
        schema = pa.schema([(n, kinds.get(n, "string")) for n in (*FIRST, *names, *LAST)])
        with parquet.ParquetWriter(path, schema) as table:
            yield lambda rows: table.write_table(
                pa.Table.from_pylist([flat(row, names) for row in rows], schema)
            )
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if suffix == ".json":
            yield from _json_list(file)
        else:
            yield from _csv_rows(file, names)


def _json_list(file: TextIO) -> Iterator[Callable[[list[Row]], None]]:
    def write(rows: list[Row]) -> None:
        for row in rows:
            file.write(",\n  " if file.tell() > 1 else "\n  ")
            json.dump(row, file, ensure_ascii=False)

    file.write("[")
    yield write
    file.write("\n]\n")


def _csv_rows(file: TextIO, names: Sequence[str]) -> Iterator[Callable[[list[Row]], None]]:
    table = csv.DictWriter(file, (*FIRST, *names, *LAST), lineterminator="\n")
    table.writeheader()
    yield lambda rows: table.writerows(flat(row, names) for row in rows)
