"""The kinds of fuzzed inputs: each makes one input from a generator and gives it to its reader.

A case returns whether the input was accepted. BadInput means refused; any other error is a bug.
"""

import io
import json
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as bytes_of

from demur.files.checked_files import content_digest, read_tensors
from demur.recipes import NAMED_ATTACKS, RECIPES, VOCABULARY
from demur.runs import Record, Run
from demur.runs.metadata import CERTIFICATE, CHECKPOINT, RECORD, STATE, read_metadata
from demur.runs.record import ARRAYS, check_arrays, read_npz
from demur.runs.run import load_state
from demur.spec import Spec, edit, lines, read, show
from tests.damages import npz_bytes
from tests.fuzz.command_lines import argv
from tests.fuzz.deployed import api, bundle
from tests.fuzz.mutation import ODD_TEXT, mutate_bytes, mutate_json, mutate_text
from tests.fuzz.outcomes import expect
from tests.fuzz.stored import stored
from tests.test_crash import made_up_record
from tests.test_damage_crafted import VALID

REMEDY = "restore it"
SCHEMAS = {"RECORD": RECORD, "CHECKPOINT": CHECKPOINT, "STATE": STATE, "CERTIFICATE": CERTIFICATE}
LIKE = {"net.w": torch.zeros(3, 2), "net.n": torch.tensor(0), "momentum.w": torch.zeros(3, 2)}
RECIPE = RECIPES["digits-pgdat-rr"]


# ---------------------------------------------------------------------------------- specs


@cache
def _texts() -> list[str]:
    attacks = [make(RECIPE) for make in NAMED_ATTACKS.values()]
    texts = [show(attack) for attack in attacks] + [show(attack, full=True) for attack in attacks]
    recipes = list(RECIPES.values())[:: len(RECIPES) // 8]
    return texts + [lines(recipe) for recipe in recipes]


WORDS = (*ODD_TEXT, *VOCABULARY, *(f"{name}()" for name in VOCABULARY))


def spec(random: Random, folder: Path) -> bool:
    """Read the mutated text of a spec, or apply a mutated change to a recipe."""
    if random.random() < 0.25:
        key = random.choice(("epochs", "base", "attack.eps", "head", "net", "seed", "schedule"))
        text = mutate_text(random, random.choice(WORDS) or "1", WORDS)
        found: Any = edit(RECIPE, mutate_text(random, key) if random.random() < 0.1 else key,
                          text, VOCABULARY)  # fmt: skip
    else:
        found = read(mutate_text(random, random.choice(_texts()), WORDS), VOCABULARY)
    if isinstance(found, Spec):
        expect(read(show(found), VOCABULARY) == found, "show and read disagree")
        expect(read(show(found, full=True), VOCABULARY) == found, "show and read disagree")
    return True


# ---------------------------------------------------------------------------------- JSON


def json_file(random: Random, folder: Path) -> bool:
    """Read metadata with changed bytes, or with changed values and a right digest."""
    name = random.choice(list(SCHEMAS))
    path, values = folder / "a.json", VALID[name]
    if random.random() < 0.5:
        path.write_bytes(mutate_bytes(random, _document(name)))
        found = read_metadata(path, SCHEMAS[name], REMEDY)
        same = json.dumps(found, sort_keys=True) == json.dumps(values, sort_keys=True)
        expect(same, "a changed byte changed a value")
        return True
    changed = mutate_json(random, values)
    _write_quickly(path, changed)
    read_metadata(path, SCHEMAS[name], REMEDY)
    return True


@cache
def _document(name: str) -> bytes:
    digest = content_digest(json.dumps(VALID[name], sort_keys=True).encode())
    return json.dumps(VALID[name] | {"metadata_digest": digest}, indent=2).encode()


def _write_quickly(path: Path, values: dict[str, Any]) -> None:
    """As write_json, without its syncs."""
    try:
        text = json.dumps(values, sort_keys=True)
    except RecursionError:
        path.write_text('{"a":' * 3000)
        return
    digest = content_digest(text.encode())
    path.write_text(json.dumps(values | {"metadata_digest": digest}))


# ---------------------------------------------------------------------------------- arrays


METADATA = made_up_record("a", "0").metadata


@cache
def _packed() -> tuple[bytes, ...]:
    arrays = made_up_record("a", "0").arrays
    kinds = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)
    return tuple(npz_bytes(arrays, compression) for compression in kinds)


def npz(random: Random, folder: Path) -> bool:
    """Read the arrays of a record from a mutated file, or from one with odd arrays."""
    if random.random() < 0.5:
        content = mutate_bytes(random, random.choice(_packed()))
    else:
        content = _odd_npz(random)
    arrays = read_npz(io.BytesIO(content), folder / "a.npz", REMEDY)
    metadata = METADATA | {"scores": random.choice(([], ["a"], ["a", "b"]))}
    check_arrays(arrays, metadata)
    record = Record(arrays, metadata)
    expect(len(repr(record)) > 0 and record.correct.shape == (2,), "arrays of other shapes")
    expect(all(score.shape == (2,) for score in record.stored_scores.values()), "other scores")
    expect(record.scores_only or len(record.output.feature) == 2, "another output")
    return True


def _odd_npz(random: Random) -> bytes:
    arrays: dict[str, Any] = {k: v.numpy() for k, v in made_up_record("a", "0").arrays.items()}
    for _ in range(random.choice((1, 1, 2))):
        name = random.choice((*ARRAYS, "y", "../x", "scores", "correct"))
        shape = tuple(random.choice((0, 1, 2, 2, 2, 3)) for _ in range(random.randrange(5)))
        dtype = random.choice(
            ("<f4", "<f4", "<i8", ">f4", "<f8", "|b1", "<U3", "|S2", "<c8", "<M8[s]")
        )
        arrays[name] = np.zeros(shape, dtype)
        if random.random() < 0.3 and random.random() < 0.5:
            arrays.pop(random.choice(list(arrays)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, array in arrays.items():
            part = io.BytesIO()
            np.lib.format.write_array(part, array, allow_pickle=False)
            content = part.getvalue()
            if random.random() < 0.1:
                content = mutate_bytes(random, content)
            compression = random.choice(
                (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
            )
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), content, compression)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------- tensors


def safetensors(random: Random, folder: Path) -> bool:
    """Read weights from a mutated safetensors file whose digest is right."""
    path, content = folder / "a.safetensors", _weights()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size], content[8 + size :]
    if random.random() < 0.4:
        values = mutate_json(random, json.loads(header))
        try:
            header = json.dumps(values).encode()
        except RecursionError:
            header = b"[" * 100_000
    else:
        header = mutate_bytes(random, header)
    size = len(header) if random.random() < 0.9 else random.choice((0, 1, 1 << 31, 1 << 63, 10**8))
    data = mutate_bytes(random, data) if random.random() < 0.2 else data
    path.write_bytes(struct.pack("<Q", size) + header + data)
    found = read_tensors(path, content_digest(path.read_bytes()), REMEDY, LIKE)
    kinds, like = (
        {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in some.items()}
        for some in (found, LIKE)
    )
    expect(kinds == like, "tensors of another net")
    return True


@cache
def _weights() -> bytes:
    return bytes(bytes_of(LIKE))


# ---------------------------------------------------------------------------------- states


def state(random: Random, folder: Path) -> bool:
    """Load the state of a training whose metadata or tensors were changed."""
    run, weights = Run(folder / "run"), _weights()
    (run.path / "state").mkdir(parents=True, exist_ok=True)
    tensors = mutate_bytes(random, weights) if random.random() < 0.3 else weights
    (run.path / "state" / "e").write_bytes(tensors)
    (run.path / "state" / "b").write_bytes(weights)
    known = random.random() < 0.7  # whether the digest follows the change
    digests = {"digest": content_digest(tensors if known else weights)}
    values = VALID["STATE"] | digests | {"best_digest": content_digest(weights)}
    whole = random.random() < 0.3
    _write_quickly(
        run.path / "state" / "now.json", values if whole else mutate_json(random, values)
    )
    found, loaded, best = load_state(run, LIKE, LIKE)
    expect(set(loaded) == set(best) == set(LIKE), "other tensors")
    expect(found.best is not None and 1 <= found.best.epoch <= found.epoch == len(found.lines),
           "epochs that disagree")  # fmt: skip
    expect(known or tensors == weights, "a changed byte was not noticed")
    return True


KINDS: dict[str, Callable[[Random, Path], bool]] = {
    "spec": spec, "json": json_file, "npz": npz, "safetensors": safetensors, "state": state,
    "argv": argv, "bundle": bundle, "api": api,
    "stored": stored,
}  # fmt: skip
