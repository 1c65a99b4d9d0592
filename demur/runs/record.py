"""A record: the net's output for every image of one attack, and the metadata of that attack.

An attack takes hours and scoring takes seconds, so rejectors, metrics and figures read records.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
import torch
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from numpy.typing import NDArray
from torch import Tensor

from demur import metrics
from demur.attacks import Attack
from demur.attacks.balls import L2, ROUNDING, Ball, Linf
from demur.errors import BadInput, import_optional
from demur.files import checked_files as files
from demur.output import Output, prediction
from demur.recipes import VOCABULARY
from demur.rejectors.certainty import tcon
from demur.rejectors.rule import Rejector, Score
from demur.runs.metadata import RECORD, read_metadata
from demur.spec import CUSTOM, read, show
from demur.spec.code_digest import code_of

if TYPE_CHECKING:
    import pandas

TRUE = "T-Con"  # name of the true confidence among the scores of a scores-only record
NOTEBOOK = "'demur[notebook]'"
MAX_NPZ = 4096 * files.MEGABYTE  # bytes of the file
SMALL = 256 * files.MEGABYTE  # bytes of all arrays that any file may unpack to
MAX_RATIO = 20  # unpacked bytes of a larger file per byte
MAX_DICTIONARY = 64 * files.MEGABYTE  # of LZMA, allocated before a byte is unpacked
LOCAL_HEADER = 30  # bytes of the fixed part of a member's header
COMPRESSIONS = (ZIP_STORED, ZIP_DEFLATED, ZIP_LZMA)
REMEDY = "restore it, or delete it and make it again with demur attack where the weights are"
MAX_COLUMNS = 100  # of a line of repr(record)
FIRST_INDEX = "first_index"  # in the metadata, instead of the array `index` of consecutive images
MAX_INDEX = 2**62  # keeps the last index inside 64 bits


class ArrayType(NamedTuple):
    """Declared dtype of an array, and its shape in the letters of docs/reference/files.md."""

    dtype: str
    shape: str


ARRAYS = {
    "y": ArrayType("<i8", "N"), "index": ArrayType("<i8", "N"),
    "size_linf": ArrayType("<f4", "N"), "size_l2": ArrayType("<f4", "N"),
    "logits": ArrayType("<f4", "NC"), "aux": ArrayType("<f4", "NA"),
    "feature": ArrayType("<f4", "ND"), "x_adv": ArrayType("<f4", "MEHW"),
    "scores": ArrayType("<f4", "SN"), "correct": ArrayType("|b1", "N"),
}  # fmt: skip
HALF = {"feature": "<f2"}  # dtypes that a pack may store instead; they are read as floats
ALWAYS = ("y", "index", "size_linf", "size_l2")
NORMS = ("size_linf", "size_l2")  # a scores-only record may lack one; of a corruption, both
OUTPUTS = (("logits", "aux"), ("scores", "correct"))  # a record has one pair


def write_npz(
    stream: IO[bytes], arrays: Mapping[str, Tensor], compression: int = ZIP_DEFLATED
) -> None:
    """Write arrays as an npz file without time stamps, so that equal arrays give equal bytes."""
    stream.truncate(stream.seek(0))
    with ZipFile(stream, "w") as file:
        for name, values in arrays.items():
            member = ZipInfo(f"{name}.npy")
            member.compress_type = compression
            member.file_size = 128 + values.nbytes  # with the header; decides on ZIP64
            with file.open(member, "w") as packed:
                header = header_data_from_array_1_0(values.contiguous().numpy())
                write_array_header_1_0(packed, header)
                for part in files.in_pieces(values):
                    packed.write(part.contiguous().numpy().data)
        unpacked = sum(member.file_size for member in file.infolist())
    if compression != ZIP_STORED and unpacked > _max_unpacked(stream.tell()):
        write_npz(stream, arrays, ZIP_STORED)  # so dense that the reader would raise


def read_npz(stream: IO[bytes], path: Path, remedy: str) -> dict[str, Tensor]:
    """Arrays of a record; BadInput if the file is not such an npz file.

    Nothing is unpacked before the sizes in the zip directory are known to be in bounds.
    """
    try:
        with ZipFile(stream) as file:
            _check_directory(file, stream)
            return {
                member.filename.removesuffix(".npy"): _read_member(file, member)
                for member in file.infolist()
            }
    except BadInput as error:
        raise BadInput(f"{path} is damaged: {error}; {remedy}") from None
    except Exception:  # zipfile and its decompressors raise many kinds
        raise BadInput(f"{path} is damaged: it is not a file of arrays; {remedy}") from None


def check_arrays(arrays: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Raise BadInput if the arrays of a record lack one, or do not have the sizes of its metadata.

    y holds labels, index is without repetition, no value is NaN and no norm exceeds the radius.
    """
    outputs = next((pair for pair in OUTPUTS if set(pair) <= set(arrays)), OUTPUTS[0])
    scores = ("scores",) if metadata.get("scores") else ()
    has_one = is_corruption(metadata) or any(name in arrays for name in NORMS)
    optional = () if "logits" in arrays or not has_one else NORMS
    needed = [name for name in (*ALWAYS, *outputs, *scores) if name not in optional]
    if missing := [name for name in needed if name not in arrays]:
        raise BadInput(f"the array {missing[0]!r} is missing")
    sizes = {"N": metadata["n"], "S": len(metadata.get("scores", ()))}
    for name, array in arrays.items():
        for letter, size in zip(ARRAYS[name].shape, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise BadInput(f"{name} has {size} where {sizes[letter]} are expected")
        if array.is_floating_point() and any(part.isnan().any() for part in files.in_pieces(array)):
            raise BadInput(f"{name} holds values that are not numbers")
    labels = arrays["y"]
    if int(labels.min()) < 0 or int(labels.max()) >= sizes.get("C", math.inf):
        raise BadInput("y holds a label that is no class")
    if len(arrays["index"].unique()) < len(labels):
        raise BadInput("index holds an image twice")
    check_norms(arrays, str(metadata.get("spec", "")))


def is_corruption(metadata: Mapping[str, Any]) -> bool:
    """Whether the attack in the metadata of a record is a corruption."""
    return str(metadata.get("spec", "")).startswith("Corruption(")


def _max_unpacked(size: int) -> int:
    """Bytes that a file of this size may unpack to."""
    return max(SMALL, MAX_RATIO * size)


def _check_directory(file: ZipFile, stream: IO[bytes]) -> None:
    """Raise BadInput unless the members are known arrays whose sizes are in bounds."""
    members, size = file.infolist(), stream.seek(0, os.SEEK_END)
    names = [member.filename.removesuffix(".npy") for member in members]
    if unknown := [name for name in names if name not in ARRAYS]:
        raise BadInput(f"it holds {unknown[0][:40]!r}, which no record has")
    if len(set(names)) < len(names):
        raise BadInput("it holds an array twice")
    unpacked = sum(member.file_size for member in members)
    if unpacked > _max_unpacked(size):
        raise BadInput(f"its arrays have {unpacked:,} bytes, too many for {size:,} packed")
    for member in members:
        if member.compress_type not in COMPRESSIONS:
            raise BadInput(f"{member.filename} is packed in an unknown way")
        if member.compress_type == ZIP_LZMA:
            _check_lzma(member, stream)


def _check_lzma(member: ZipInfo, stream: IO[bytes]) -> None:
    """Raise BadInput if a member asks for a large LZMA dictionary."""
    stream.seek(member.header_offset)
    header = stream.read(LOCAL_HEADER)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    # two bytes each of version and length, one of settings, four of the dictionary's size
    stream.seek(name + extra + 5, os.SEEK_CUR)
    dictionary = int.from_bytes(stream.read(4), "little")
    if dictionary > MAX_DICTIONARY:
        raise BadInput(f"{member.filename} needs {dictionary:,} bytes to be unpacked")


def _read_member(file: ZipFile, member: ZipInfo) -> Tensor:
    """Read one array of the declared dtype, byte order, number of dimensions and size."""
    name = member.filename.removesuffix(".npy")
    dtype, letters = ARRAYS[name]
    with file.open(member) as packed:
        values = files.read_array(packed, member.file_size)
        rest = packed.read(1)
    if values.dtype.str not in (dtype, HALF.get(name)):
        raise BadInput(f"{name} is of type {values.dtype.str} instead of {dtype}")
    if values.ndim != len(letters):
        raise BadInput(f"{name} has {values.ndim} dimensions instead of {len(letters)}")
    if rest:
        raise BadInput(f"{name} has more bytes than those of its shape {values.shape}")
    if dtype == "|b1" and values.view(np.uint8).max(initial=0) > 1:
        raise BadInput(f"{name} holds values other than 0 and 1")
    return files.tensor_of(values.astype(dtype, copy=False))


@dataclass(frozen=True)
class Record:
    """Output of a net for N images under one attack, with the metadata of the attack.

    Attributes:
        arrays: Tensors by name, each with N images first and in data-set order: `y` (N, labels),
            `index` (N, positions in the data set), `logits` (N, C), `aux` (N, H: outputs of the
            auxiliary head), `size_linf` and `size_l2` (N, norms of the perturbation). Optional:
            `feature` (N, F) and `x_adv` (the first images, C, H, W). A scores-only record has
            `scores` (S, N) and `correct` (N) instead of `logits` and `aux`, `size_l2` only if the
            attack is measured in L2, and no norms if it is a corruption.
        metadata: JSON values: label, attack and its digest, split, thresholds, digest of the
            weights, provenance. Digests of two records are equal if their attack, thresholds,
            weights and images are.

    Example:
        >>> record = Run.open("digits-pgdat-rr").records("test")[0]
        >>> record.label, record.correct.shape == record.y.shape
        ('clean', True)
    """

    arrays: dict[str, Tensor]
    metadata: dict[str, Any]

    def __repr__(self) -> str:
        known, n = self.metadata.get, len(self.arrays.get("y", ()))
        has_predictions = "correct" in self.arrays or {"logits", "aux"} <= {*self.arrays}
        accuracy = f"{100 * self.correct.mean():.1f}%" if n and has_predictions else "unknown"
        shapes = (f"{name}{tuple(array.shape)}" for name, array in self.arrays.items())
        parts = (
            f"Record({known('label')!r}, split={known('split')!r}, n={n}, accuracy={accuracy}, "
            f"digest={str(known('digest'))[:12]!r},",
            f"  arrays: {', '.join(shapes)},",
            f"  created {known('created')} on {known('device')})",
        )
        lines = (part.replace("\n", " ") for part in parts)
        return "\n".join(
            line if len(line) <= MAX_COLUMNS else f"{line[: MAX_COLUMNS - 3]}..." for line in lines
        )

    @property
    def label(self) -> str:
        """Name of the attack as the user typed it."""
        return str(self.metadata["label"])

    @property
    def digest(self) -> str:
        """Digest of the inputs of the record: attack, thresholds, weights, images and options."""
        return str(self.metadata["digest"])

    @property
    def y(self) -> Tensor:
        """True labels; N."""
        return self.arrays["y"]

    @property
    def scores_only(self) -> bool:
        """Whether the record contains scores instead of the net's output."""
        return "logits" not in self.arrays

    @property
    def output(self) -> Output:
        """Output of the net; features have width 0 if they were not stored.

        Raises BadInput for a scores-only record.
        """
        if self.scores_only:
            raise BadInput(
                f"the record of {self.label} has only scores ({', '.join(self.stored_scores)}), "
                "and this needs the net's output; train the recipe again and attack the new run"
            )
        logits = self.arrays["logits"]
        none = logits.new_zeros(len(logits), 0)
        return Output(logits, self.arrays.get("feature", none), self.arrays["aux"])

    @property
    def stored_scores(self) -> dict[str, Tensor]:
        """Scores (N each) computed before features or output were dropped, by rejector spec."""
        names = self.metadata.get("scores", [])
        return dict(zip(names, self.arrays["scores"], strict=True)) if names else {}

    def with_stored(self, scores: Mapping[str, Tensor]) -> "Record":
        """The record with more stored scores."""
        stored = self.stored_scores | dict(scores)
        if not stored:
            return self
        arrays = self.arrays | {"scores": torch.stack(list(stored.values()))}
        return Record(arrays, self.metadata | {"scores": list(stored)})

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Which predictions are correct; N."""
        if self.scores_only:
            return self.arrays["correct"].numpy()
        return (prediction(self.output) == self.y).numpy()


def record_path(folder: Path, label: str, split: str, digest: str) -> Path:
    """Path of the record of an attack on a split."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", label)[:80]  # characters that every file system allows
    return folder / f"{name}-{split}-{digest[:12]}.npz"


def write_record(path: Path, record: Record, tight: bool = False) -> None:
    """Write arrays to path and metadata beside it as JSON.

    The metadata is written last: arrays without metadata are not a record. `tight` compresses with
    LZMA, which takes longer and makes the file a fifth smaller; of consecutive images it stores
    the first index only.
    """
    compression = ZIP_LZMA if tight else ZIP_DEFLATED
    arrays, metadata = dict(record.arrays), dict(record.metadata)
    index = arrays["index"]
    if tight and torch.equal(index, _consecutive(int(index[0]), len(index))):
        metadata[FIRST_INDEX] = int(index[0])
        del arrays["index"]
    with files.atomic_file(path) as file:
        write_npz(file, arrays, compression)
        metadata["file_digest"] = files.file_digest(file)
    files.write_json(path.with_suffix(".json"), metadata)


def _consecutive(first: int, count: int) -> Tensor:
    """Indices of consecutive images."""
    if first > MAX_INDEX:
        raise BadInput(f"{FIRST_INDEX} is {first}, which is no index")
    return torch.arange(first, first + count)


def move_record(path: Path, folder: Path) -> None:
    """Move a complete record into another folder, the metadata last."""
    for part in (path, path.with_suffix(".json")):
        files.move_file(part, folder)


def read_record(path: Path) -> Record:
    """Read the record at path and check its digests.

    Raises BadInput if a file is missing or damaged, if a key or an array is missing or of another
    type or size than declared, or if the name says another attack, split or digest than the
    metadata: a record is never believed by its file name.
    """
    metadata_path = path.with_suffix(".json")
    metadata = read_metadata(metadata_path, RECORD, REMEDY)
    meant = record_path(path.parent, *(str(metadata[key]) for key in ("label", "split", "digest")))
    if path.name != meant.name:
        raise BadInput(
            f"{path} holds the record that belongs in {meant.name}; rename it, or delete it and "
            "make the record again with demur attack"
        )
    if not path.exists():
        raise BadInput(
            f"{path} is missing, though {metadata_path.name} is there; restore it, or delete "
            f"{metadata_path.name} and make the record again with demur attack"
        )
    with files.open_regular_file(path, MAX_NPZ, REMEDY) as file:
        files.check_digest(path, metadata["file_digest"], files.file_digest(file), REMEDY)
        arrays = read_npz(file, path, REMEDY)
    first = metadata.pop(FIRST_INDEX, None)
    try:
        if first is not None and "index" not in arrays:
            arrays["index"] = _consecutive(first, len(arrays.get("y", ())))
        check_arrays(arrays, metadata)
    except BadInput as error:
        raise BadInput(f"{path} is damaged: {error}; {REMEDY}") from None
    return Record(arrays, metadata)


def finished_record(folder: Path, split: str, digest: str) -> Path | None:
    """Path of a finished record with this digest, under any label; None if there is none."""
    for path in folder.glob(f"*-{split}-{digest[:12]}.npz"):
        if path.with_suffix(".json").is_file():
            return path
    return None


def identity(**parts: Any) -> str:
    """SHA-256 of named JSON values as 64 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Records(list[Record]):
    """Records of a run, which also convert to tables.

    Args:
        records: The records.
        rejectors: Rejectors of the run by name, whose scores become columns.

    Example:
        >>> records = Run.open("digits-pgdat-rr").records("test")
        >>> table = records.to_pandas()
        >>> list(table.columns[:4])
        ['attack', 'record', 'split', 'index']
    """

    def __init__(
        self, records: Iterable[Record] = (), rejectors: Mapping[str, Rejector] | None = None
    ) -> None:
        super().__init__(records)
        self.rejectors = dict(rejectors or {})

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a table with one line per image and record.

        Columns: attack, record, split, index, y, predicted, correct, the norms of the perturbation,
        T-Con, and every score that is stored or needs no fitting. A value that a record lacks is
        missing.
        """
        pandas = import_optional("pandas", "this needs pandas", NOTEBOOK)
        parts = [pandas.DataFrame(_columns_of(record, self.rejectors)) for record in self]
        return pandas.concat(parts, ignore_index=True) if parts else pandas.DataFrame()

    def metrics(self, coverage: float = 0.8, risk: float = 0.05) -> "pandas.DataFrame":
        """Return a table with one line per record and score of `to_pandas`.

        Columns: attack, record, split, score, n, accuracy, auroc, aurc, the selective risk at
        `coverage` and the coverage at `risk`.
        """
        pandas = import_optional("pandas", "this needs pandas", NOTEBOOK)
        lines = []
        for record in self:
            columns, right = _columns_of(record, self.rejectors), record.correct
            for name in [one for one in (*self.rejectors, TRUE) if one in columns]:
                lines.append({key: columns[key][0] for key in ("attack", "record", "split")} | {
                    "score": name, "n": len(right), "accuracy": metrics.accuracy(right),
                    "auroc": metrics.auroc(columns[name], right),
                    "aurc": metrics.aurc(columns[name], right),
                    "risk_at_coverage": metrics.risk_at_coverage(columns[name], right, coverage),
                    "coverage_at_risk": metrics.coverage_at_risk(columns[name], right, risk),
                })  # fmt: skip
        return pandas.DataFrame(lines)


def _columns_of(record: Record, rejectors: Mapping[str, Rejector]) -> dict[str, NDArray[Any]]:
    """Columns of one record, N each."""
    n = len(record.y)
    columns: dict[str, NDArray[Any]] = {
        "attack": np.full(n, record.label, dtype=object),
        "record": np.full(n, record.digest[:12], dtype=object),
        "split": np.full(n, str(record.metadata["split"]), dtype=object),
        "index": record.arrays["index"].numpy(),
        "y": record.y.numpy(),
    }
    if not record.scores_only:
        columns["predicted"] = prediction(record.output).numpy()
    columns["correct"] = record.correct
    for name in ("size_linf", "size_l2"):
        if name in record.arrays:
            columns[name] = record.arrays[name].numpy()
    stored = record.stored_scores
    for name, rejector in rejectors.items():
        if (text := show(rejector, full=True)) in stored:
            columns[name] = stored[text].double().numpy()
        elif isinstance(rejector, Score) and not record.scores_only:
            with torch.no_grad():
                columns[name] = rejector(record.output).double().numpy()
    if TRUE in stored:
        columns[TRUE] = stored[TRUE].double().numpy()
    elif not record.scores_only:
        columns[TRUE] = tcon(record.output, record.y).double().numpy()
    return columns


@lru_cache(maxsize=512)
def attack_of(text: str) -> Attack:
    """The attack that a text spells; BadInput if it spells none."""
    found = read(text, VOCABULARY)
    if not isinstance(found, Attack):
        raise BadInput(f"{text[:40]!r} is not an attack")
    return found


def code_problem(record: Record) -> str:
    """Why today's code is not that of a record's attack: changed since, or not imported."""
    text, known = str(record.metadata["spec"]), record.metadata.get("user_code", {})
    try:
        now = code_of(attack_of(text)) if f"{CUSTOM}(" in text else {}
    except BadInput as error:
        return str(error)
    changed = ", ".join(path for path, found in now.items() if known.get(path) != found)
    again = "has changed since this attack; make it again with demur attack, or delete it"
    return f"{changed} {again}" if changed else ""


def check_norms(arrays: Mapping[str, Tensor], attack: str) -> None:
    """Raise BadInput if a perturbation is larger than the one ball in the text of its attack."""
    try:
        balls = attack_of(attack).balls()
    except BadInput:  # of a user's own class, or of another version
        return
    if len(balls) == 1 and (problem := norm_problem(arrays, balls.pop())):
        raise BadInput(problem)


def norm_problem(arrays: Mapping[str, Tensor], ball: Ball) -> str:
    """Say which stored norm exceeds the radius of a ball, up to rounding; empty if none does."""
    name = {Linf: "size_linf", L2: "size_l2"}.get(type(ball), "")
    largest = float(arrays[name].max()) if name in arrays else 0.0
    if largest <= ball.eps + ROUNDING * (1 + ball.eps):
        return ""
    return f"{name} is {largest:.6g} in an attack of radius {ball.eps:.6g}"
