"""Damaged results: records, guards, caches of images, certificates and states of attacks.

Without a new digest, a damaged file is refused or means what it meant. With digests that follow,
`demur verify` ends with findings or without, never with a traceback.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from demur import verify
from demur.attacks import PGD, Clean
from demur.attacks.balls import Linf
from demur.audits.ensemble_state import read_state
from demur.calibrate import Coverage
from demur.data.image_cache import read_images
from demur.evaluate import LoadedRun, RecordOptions, archive, run_attack
from demur.evaluate.certificates import issue
from demur.files.checked_files import content_digest, read_json
from demur.guards import Guard
from demur.recipes import recipe
from demur.runs import Run
from demur.runs.metadata import CERTIFICATE, read_metadata
from demur.runs.record import read_record
from demur.training import train
from tests.conftest import TINIEST
from tests.damages import edit_state, write_state
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.fuzz.outcomes import expect
from tests.own_images import write_folder

BLANK = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@cache
def _made(folder: Path) -> Path:
    """A small run with everything that can be stored, in a folder of its own."""
    root = folder / "stored"
    loaded = LoadedRun(train(recipe("digits-pgdat-rr", TINIEST), root / "run"), "cpu")
    run_attack(loaded, "clean", Clean(), RecordOptions(n=20, keep_images=2))
    loaded.clean("cal")
    run_attack(loaded, "pgd-1", PGD(Linf(0.1), steps=1), RecordOptions(n=20, keep_images=2))
    issue(loaded, "R-Con", Coverage(0.5))
    archive(loaded, root / "scores", only=["R-Con"])
    Guard.from_run(loaded, coverage=0.5, accept_chance=True).save(root / "guard")
    write_state(root / "audit" / "a.state", BLANK)
    write_folder(root / "photos", 36)
    with patch.dict("os.environ", XDG_CACHE_HOME=str(root / "cache")):
        read_images(str(root / "photos"), 8, None)
    return root


def _record(path: Path) -> Any:
    record = read_record(path.with_suffix(".npz"))
    return [record.metadata, {name: array.tolist() for name, array in record.arrays.items()}]


def _guard(path: Path) -> Any:
    guard = Guard.load(path.parent)
    return [guard(BLANK).rows(), guard.calibration, list(guard.class_names)]


def _cache(path: Path) -> Any:
    root = path
    while root.name != "cache":
        root = root.parent
    with patch.dict("os.environ", XDG_CACHE_HOME=str(root)):
        found = read_images(str(root.parent / "photos"), 8, None)
    return [
        np.asarray(found.pixels).tolist(),
        found.y.tolist(),
        found.listing,
        found.metadata["classes"],
    ]


def _run(path: Path) -> Any:
    run = Run(path.parent)
    net = run.net(torch.device("cpu"))
    return [run.checkpoint, net(BLANK).logits.tolist()]


READERS: dict[str, Callable[[Path], Any]] = {
    "run/records/*": _record, "scores/records/*": _record, "guard/*.json": _guard,
    "guard/*.safetensors": _guard, "cache/demur/images/*/*": _cache,
    "run/certificates/*": lambda path: read_metadata(path, CERTIFICATE, "restore it"),
    "audit/*": lambda path: {k: v.tolist() for k, v in read_state(path).items()},
    "run/*.json": _run, "run/*.safetensors": _run,
}  # fmt: skip
WEIGHTS = (30, 20, 3, 3, 3, 18, 18, 3, 2)  # how often each is damaged: more where reading is fast


@cache
def _meaning(path: Path, kind: str) -> str:
    return _values(READERS[kind](path))


def _values(found: Any) -> str:
    return json.dumps(found, sort_keys=True)  # tensors of a file come in any order


def stored(random: Random, folder: Path) -> bool:
    """Damage one stored file, and read it or verify what it belongs to."""
    root = _made(folder)
    kind = random.choices(list(READERS), WEIGHTS)[0]
    path = random.choice(sorted(p for p in root.glob(kind) if p.is_file()))
    meaning, content = _meaning(path, kind), path.read_bytes()
    try:
        if kind.startswith("cache") or random.random() < 0.97:
            path.write_bytes(_damaged(random, content))
            expect(_values(READERS[kind](path)) == meaning, f"other numbers of {path}")
            return True
        with_arrays = path.with_suffix(".npz").read_bytes() if path.suffix == ".npz" else b""
        return _forge_and_verify(random, path, with_arrays)
    finally:
        if not path.is_file() or path.read_bytes() != content:  # a cache was built again
            path.write_bytes(content)


def _damaged(random: Random, content: bytes) -> bytes:
    return mutate_bytes(random, content) if random.random() < 0.8 else random.choice((
        b"", content[::-1], content * 2, bytes(len(content)), random.randbytes(len(content)),
    ))  # fmt: skip


def _forge_and_verify(random: Random, path: Path, arrays: bytes) -> bool:
    """Change values with digests that follow, and verify the run, archive or guard."""
    place = next(p for p in path.parents if p.parent.name == "stored")
    beside = path.with_suffix(".json")
    before = {p: p.read_bytes() for p in (path, beside) if p.is_file()}
    try:
        if path.suffix == ".json":
            values = mutate_json(random, read_json(path, "restore it"))
            with suppress(RecursionError):
                text = json.dumps(values, sort_keys=True).encode()
                path.write_text(json.dumps(values | {"metadata_digest": content_digest(text)}))
        elif arrays:
            path.write_bytes(mutate_bytes(random, arrays))
            values = read_json(beside, "restore it") | {
                "file_digest": content_digest(path.read_bytes())
            }
            text = json.dumps(values, sort_keys=True).encode()
            beside.write_text(json.dumps(values | {"metadata_digest": content_digest(text)}))
        elif path.suffix == ".state":
            name = random.choice(("x_adv", "broken_by", "tried", "value"))
            edit_state(path, **{name: lambda v: v[random.randrange(len(v)) :] - random.random()})
        found = verify(place, n=0)
        lines = [*map(str, found.findings), *found.lines()]
        expect(not any("\n" in line for line in lines), "a finding of several lines")
        return not found.findings
    finally:
        for file, content in before.items():
            file.write_bytes(content)
