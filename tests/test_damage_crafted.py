"""Forged files: right digests around wrong content. One sentence names the file."""

import io
import math
import os
import struct
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demur.calibrate import Risk
from demur.errors import BadInput
from demur.evaluate import LoadedRun
from demur.evaluate.certificates import issue
from demur.files.checked_files import (
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
)
from demur.recipes import read_recipe
from demur.runs import Run
from demur.runs.metadata import CERTIFICATE, CHECKPOINT, RECORD, STATE, read_metadata
from demur.runs.record import ARRAYS, read_record, write_record
from demur.runs.run import load_state, save_state
from tests.conftest import Command
from tests.damages import npz_bytes
from tests.test_cli import expect_error
from tests.test_crash import RECIPE, WEIGHTS, made_up_record

REMEDY = "restore it"
LABEL, DIGEST = "pgd-20", "0123456789ab"
NAME = f"{LABEL}-test-{DIGEST}.npz"


# ---------------------------------------------------------------------------------- regular files


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes")
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "folder", "device"],
)
@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_json(path, REMEDY),
        lambda path: read_tensors(path, "0", REMEDY, WEIGHTS),
        read_recipe,
    ],
    ids=["json", "tensors", "recipe"],
)
def test_only_regular_files_are_read(
    make: Callable[[Path], None], read: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(
        BadInput, match=r"file.* (is a (pipe|folder|device)|there is no file)|no file"
    ):
        read(tmp_path / "file")


def test_a_huge_file_is_not_loaded(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    for read in (
        lambda path: read_json(path, REMEDY),
        lambda path: read_tensors(path, "0", REMEDY, WEIGHTS),
        read_recipe,
    ):
        with pytest.raises(BadInput, match=r"huge has 1,099,511,627,776 bytes and may have"):
            read(tmp_path / "huge")


# ---------------------------------------------------------------------------------- JSON


VALID: dict[str, dict[str, Any]] = {
    "RECORD": made_up_record(LABEL, DIGEST).metadata | {"file_digest": "0"},
    "CHECKPOINT": {"epoch": 2, "value": None, "weights": "0", "recipe_digest": "0", "reason": "r"},
    "STATE": {
        "epoch": 2, "file": "e", "digest": "0", "best_file": "b", "best_digest": "0",
        "best": {"epoch": 1, "value": 0.5}, "lines": ["{}", "{}"], "plan": None,
    },
    "CERTIFICATE": {
        **dict.fromkeys(("n", "pilot", "accepted", "accepted_wrong", "cal_images"), 5),
        **{f"{share}_interval": {"lo": 0, "hi": 1} for share in ("risk", "tpr", "coverage")},
        **dict.fromkeys(("rejector", "rejector_spec", "guarantee", "sentence", "on"), "a"),
        **dict.fromkeys(("attack", "attack_spec", "valid_for", "cal_record", "weights"), "a"),
        "quantity": "risk", "level": 0.1, "confidence": 0.9, "thresholds": [-math.inf],
    },
}  # fmt: skip
SCHEMAS = {"RECORD": RECORD, "CHECKPOINT": CHECKPOINT, "STATE": STATE, "CERTIFICATE": CERTIFICATE}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_is_required_and_has_its_type(name: str, tmp_path: Path) -> None:
    path, schema = tmp_path / "a.json", SCHEMAS[name]
    wrongs: tuple[Any, ...] = ([[]], {"a": []}, math.inf, [None])
    write_json(path, VALID[name])
    read_metadata(path, schema, REMEDY)
    for key in schema.required:
        write_json(path, {k: v for k, v in VALID[name].items() if k != key})
        missing = rf"a\.json is damaged: the key '{key}' is missing; restore it"
        with pytest.raises(BadInput, match=missing):
            read_metadata(path, schema, REMEDY)
        for wrong in wrongs:
            write_json(path, VALID[name] | {key: wrong})
            with pytest.raises(BadInput, match=rf"a\.json is damaged: .*{key}.*; restore it"):
                read_metadata(path, schema, REMEDY)


def test_optional_keys_have_types_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for key in RECORD.optional:
        write_json(path, VALID["RECORD"] | {key: [[1]]})
        with pytest.raises(BadInput, match=rf"a\.json is damaged: {key}.* must be "):
            read_metadata(path, RECORD, REMEDY)
    with pytest.raises(BadInput, match=r"the key 'best.epoch' is missing"):
        write_json(path, VALID["STATE"] | {"best": {"value": 1.0}})
        read_metadata(path, STATE, REMEDY)
    with pytest.raises(BadInput, match=r"file must be a word that names a file beside it"):
        write_json(path, VALID["STATE"] | {"file": "../../../etc/passwd"})
        read_metadata(path, STATE, REMEDY)


@pytest.mark.parametrize(
    "content",
    [
        100_000 * "[", 900 * "[" + 900 * "]", '{"a":' * 990 + "1" + "}" * 990, "1" + 5000 * "0",
        '{"metadata_digest": "0", "a": "\\ud800"}', '{"metadata_digest": ' + 5000 * "[" + "1",
    ],
)  # fmt: skip
def test_odd_json_gives_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(BadInput, match=r"a\.json is damaged: .*; restore it"):
        read_json(tmp_path / "a.json", REMEDY)


# ---------------------------------------------------------------------------------- arrays


def npz(**arrays: Any) -> bytes:
    """An npz file of NumPy's own."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def changed(**arrays: Any) -> bytes:
    """The arrays of a valid record with changes; None leaves one out."""
    known = {name: array.numpy() for name, array in made_up_record(LABEL, DIGEST).arrays.items()}
    return npz(**{name: array for name, array in (known | arrays).items() if array is not None})


def bomb() -> bytes:
    """270 MB of zeros in 270 kB: packed blocks of 1 MB, one after the other."""
    member = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (2, 34 << 20)}
    np.lib.format.write_array_header_1_0(member, header)
    buffer = io.BytesIO(changed(logits=None))
    with (
        zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("logits.npy", "w") as packed,
    ):
        packed.write(member.getvalue())
        for _ in range(272):
            packed.write(bytes(1 << 20))
    return buffer.getvalue()


def lying_size() -> bytes:
    """A member that unpacks to more than the directory says."""
    content = bytearray(changed(feature=np.zeros((2, 50_000), np.float32)))
    at = content.rindex(b"feature.npy") - 46 + 24
    content[at : at + 4] = struct.pack("<I", 200)
    return bytes(content)


def huge_dictionary() -> bytes:
    """An LZMA member that asks for 2 GB before a byte is unpacked."""
    content = bytearray(npz_bytes(made_up_record(LABEL, DIGEST).arrays, zipfile.ZIP_LZMA))
    at = content.index(b"y.npy") + len(b"y.npy") + 5
    content[at : at + 4] = struct.pack("<I", 1 << 31)
    return bytes(content)


def twice() -> bytes:
    buffer = io.BytesIO(changed())
    with zipfile.ZipFile(buffer, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("y.npy", file.read("y.npy"))
    return buffer.getvalue()


EYE = np.eye(2, dtype=np.float32)
CRAFTED: dict[str, tuple[Callable[[], bytes], str]] = {
    "no zip": (lambda: b"PK no zip", "not a file of arrays"),
    "empty": (lambda: b"", "not a file of arrays"),
    "no array": (npz, "the array 'y' is missing"),
    **{f"without {name}": (partial(changed, **{name: None}), f"'{name}' is missing")
       for name in ("y", "index", "logits", "aux", "size_linf", "size_l2")},
    "objects": (lambda: changed(y=np.array([None, 1], object)), "it is not a file of arrays"),
    "words": (lambda: changed(y=np.array(["a", "b"])), "y is of type <U1"),
    "big-endian": (lambda: changed(logits=EYE.astype(">f4")), "logits is of type >f4"),
    "doubles": (lambda: changed(logits=EYE.astype(float)), "logits is of type <f8"),
    "records": (lambda: changed(y=np.zeros(2, [("a", "<i8")])), "y is of type |V8"),
    "flat": (lambda: changed(logits=EYE.ravel()), "logits has 1 dimensions instead of 2"),
    "short": (lambda: changed(y=np.array([1])), "y has 1 where 2 are expected"),
    "short logits": (lambda: changed(logits=EYE[:1]), "logits has 1 where 2 are expected"),
    "no images": (lambda: changed(y=np.zeros(0, np.int64)), "y has 0 where 2 are expected"),
    "scores": (lambda: changed(scores=EYE), "scores has 2 where 0 are expected"),
    "stranger": (lambda: changed(other=EYE), "'other', which no record has"),
    "twice": (twice, "an array twice"),
    "a label of no class": (lambda: changed(y=np.array([0, 2])), "a label that is no class"),
    "a negative label": (lambda: changed(y=np.array([0, -1])), "a label that is no class"),
    "an image twice": (lambda: changed(index=np.array([5, 5])), "an image twice"),
    "nan": (lambda: changed(logits=EYE * np.float32("nan")), "logits holds values that"),
    "bomb": (bomb, "its arrays have 285,"),
    "lying size": (lying_size, "damaged"),
    "huge dictionary": (huge_dictionary, "y.npy needs 2,147,483,648 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_arrays_are_named(kind: str, tmp_path: Path) -> None:
    make, sentence = CRAFTED[kind]
    path = tmp_path / NAME
    metadata = made_up_record(LABEL, DIGEST).metadata
    write_json(path.with_suffix(".json"), metadata | {"file_digest": write_bytes(path, make())})
    with pytest.raises(BadInput, match=rf"{NAME} is damaged: .*; restore it") as caught:
        read_record(path)
    assert sentence in str(caught.value)


def test_declared_arrays_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "files.md").read_text()
    table = page[page.index("## Record arrays") : page.index("## Record metadata")]
    assert [name for name in ARRAYS if f"`{name}`" not in table] == []


def test_arrays_that_pack_well_are_stored_so_that_they_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demur.runs.record.SMALL", 1000)
    record = made_up_record(LABEL, DIGEST)
    record.arrays["feature"] = torch.zeros(2, 9000)
    write_record(tmp_path / NAME, record)
    assert torch.equal(read_record(tmp_path / NAME).arrays["feature"], torch.zeros(2, 9000))


# ---------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({}, "w is missing, not float of shape"),
        ({"w": torch.zeros(5)}, r"w is float of shape \(5,\), not float of shape \(4,\)"),
        ({"w": torch.zeros(4).long()}, "w is int64"),
        ({"w": torch.zeros(4), "v": torch.zeros(1)}, "v is float of shape .*, not missing"),
    ],
)
def test_tensors_of_another_net_are_named(
    tensors: dict[str, torch.Tensor], sentence: str, tmp_path: Path
) -> None:
    digest = write_tensors(tmp_path / "a", tensors)
    with pytest.raises(BadInput, match=rf"a does not fit the recipe: {sentence}.*; restore it"):
        read_tensors(tmp_path / "a", digest, REMEDY, WEIGHTS)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"w": 1 }',
        struct.pack("<Q", 64) + b'{"w":{"dtype":"X9","shape":[4],"data_offsets":[0,16]}}'.ljust(64)
        + bytes(16),
    ],
)  # fmt: skip
def test_a_file_without_tensors_is_named(content: bytes, tmp_path: Path) -> None:
    digest = write_bytes(tmp_path / "a", content)
    with pytest.raises(BadInput, match=r"a is damaged: it is not a safetensors file; restore it"):
        read_tensors(tmp_path / "a", digest, REMEDY, WEIGHTS)


def test_a_state_whose_epochs_disagree_is_refused(tmp_path: Path) -> None:
    with Run.claim(tmp_path / "run", RECIPE) as run:
        state, _, _ = load_state(run, WEIGHTS, WEIGHTS)
        save_state(run, state.after(0.5, {}), WEIGHTS, WEIGHTS, None)
        now = run.path / "state" / "now.json"
        write_json(now, read_json(now, REMEDY) | {"epoch": 7})
        with pytest.raises(BadInput, match=r"now\.json is damaged: its epochs do not agree"):
            load_state(run, WEIGHTS, WEIGHTS)


# ---------------------------------------------------------------------------------- the command


def test_a_crafted_certificate_is_named_by_the_command(
    own_source: LoadedRun, command: Command
) -> None:
    certificate = issue(own_source, "R-Con", Risk(0.6))
    (path,) = (own_source.run.path / "certificates").glob("*.json")
    assert command("attack", str(own_source.run.path), "clean", "--n", "30")[0] == 0
    for key, wrong in (
        ("thresholds", [0.5, 0.5]),
        ("thresholds", "high"),
        ("level", "x"),
        ("on", 3),
    ):
        write_json(path, certificate.metadata | {key: wrong})
        for verb in ("score", "report"):
            expect_error(command(verb, str(own_source.run.path)), "demur calibrate")


def test_changed_metrics_are_noticed_and_old_ones_are_said_not_to_be_verified(
    own_source: LoadedRun, command: Command
) -> None:
    run = own_source.run
    assert command("attack", str(run.path), "clean", "--n", "30")[0] == 0
    assert "# metrics.jsonl: verified" in command("list", str(run.path))[1]
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("1", "2", 1))
    code, _, err = command("list", str(run.path))
    assert (code, "metrics.jsonl is damaged: expected digest" in err) == (2, True)
    expect_error(
        command("export", "--archive", str(run.path), "-o", "copy"), "metrics.jsonl is damaged"
    )
    checkpoint = run.path / "checkpoint.json"
    old = read_json(checkpoint, REMEDY)
    del old["metrics"]
    write_json(checkpoint, old)
    assert "# metrics.jsonl: not verified" in command("list", str(run.path))[1]
    assert command("export", "--archive", str(run.path), "-o", "copy")[0] == 0
