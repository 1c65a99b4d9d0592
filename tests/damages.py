"""Damages of stored results: files that were cut or swapped, and forged ones with right digests.

`python -m tests.damages` prints the table of docs/reference/verify.md.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from demur.files.checked_files import content_digest, read_json, write_json
from demur.runs import Record
from demur.runs.record import read_record, record_path, write_npz, write_record

REMEDY = "restore it"
Place = dict[str, Path]  # what a workspace holds, by name


# ---------------------------------------------------------------------------------- forged files


def edit_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file, with a digest that follows."""
    write_json(path, read_json(path, REMEDY) | changes)


def edit_record(path: Path, change: Callable[[Record], None], **metadata: Any) -> None:
    """Change a record, with digests that follow."""
    record = read_record(path)
    record = Record({k: v.clone() for k, v in record.arrays.items()}, record.metadata | metadata)
    change(record)
    for old in (path, path.with_suffix(".json")):
        old.unlink()
    split = str(record.metadata["split"])
    write_record(record_path(path.parent, record.label, split, record.digest), record)


def npz_bytes(arrays: dict[str, Tensor], compression: int) -> bytes:
    stream = io.BytesIO()
    write_npz(stream, arrays, compression)
    return stream.getvalue()


def each(*changes: Callable[[Any], object]) -> Callable[[Any], None]:
    """Make several changes, one after the other."""

    def change(given: Any) -> None:
        for one in changes:
            one(given)

    return change


def nothing(record: Record) -> None:
    """Leave the arrays as they are."""


def arrays(**changes: Callable[[Any], Any]) -> Callable[[Record], None]:
    """Change arrays in place by functions of them."""

    def change(record: Record) -> None:
        for name, function in changes.items():
            record.arrays[name] = function(record.arrays[name])

    return change


def claim_robust(record: Record) -> None:
    """Make every prediction correct."""
    logits = record.arrays["logits"]
    logits[torch.arange(len(logits)), record.y] = logits.max() + 5


def relabel(record: Record) -> None:
    """Label every image as it is predicted."""
    record.arrays["y"] = record.arrays["logits"].argmax(1)


def drop(count: int) -> Callable[[Record], None]:
    """Leave out the last images."""

    def change(record: Record) -> None:
        for name, array in record.arrays.items():
            record.arrays[name] = array[:-count] if name != "scores" else array[:, :-count]
        record.arrays["x_adv"] = record.arrays["x_adv"][: len(record.y)]
        record.metadata["n"] = len(record.y)
        record.metadata["images"] = len(record.arrays["x_adv"])

    return change


def flip_correct(wrong_to_right: bool) -> Callable[[Record], None]:
    """Flip one entry of `correct` of a scores-only record."""

    def change(record: Record) -> None:
        con, correct = record.stored_scores["Con(tau=1.0)"], record.arrays["correct"]
        sure = (correct != wrong_to_right) & ((con > 0.6) | wrong_to_right)
        correct[int(sure.nonzero()[0, 0])] = wrong_to_right

    return change


def edit_scores(name: str, function: Callable[[Any], Any]) -> Callable[[Record], None]:
    """Change one stored score."""

    def change(record: Record) -> None:
        row = record.metadata["scores"].index(name)
        record.arrays["scores"][row] = function(record.arrays["scores"][row])

    return change


def edit_weights(path: Path, checkpoint: Path, key: str) -> None:
    """Change the weights, with digests that follow."""
    tensors = load(path.read_bytes())
    name = next(name for name in tensors if tensors[name].ndim == 4)
    tensors[name] = tensors[name] * 1.5
    path.write_bytes(save(tensors))
    values = read_json(checkpoint, REMEDY)
    if key == "files":
        values["files"][path.name] = content_digest(path.read_bytes())
    else:
        values[key] = content_digest(path.read_bytes())
    write_json(checkpoint, values)


def write_state(path: Path, x: torch.Tensor) -> None:
    """Write the state of an attack that broke every third image."""
    count = len(x)
    broken = torch.where(torch.arange(count) % 3 == 0, 0, -1)
    tensors = {"x_adv": x, "value": torch.zeros(count), "broken_by": broken,
               "tried": torch.ones(count, dtype=torch.int64)}  # fmt: skip
    content = save(tensors)
    path.parent.mkdir()
    path.write_bytes(content + hashlib.sha256(content).digest())


def edit_state(path: Path, **changes: Callable[[Any], Any]) -> None:
    """Change tensors of the state of an attack, with a digest that follows."""
    tensors = load(path.read_bytes()[:-32])
    for name, function in changes.items():
        tensors[name] = function(tensors[name])
    content = save(tensors)
    path.write_bytes(content + hashlib.sha256(content).digest())


def edit_config(path: Path, change: Callable[[Any], None]) -> None:
    """Change the configuration of a guard, with a digest that follows."""
    config = read_json(path / "config.json", REMEDY)
    change(config)
    write_json(path / "config.json", config)


def put(value: Any, *keys: Any) -> Callable[[Any], None]:
    """Put a value at the end of a path of keys."""

    def change(config: Any) -> None:
        for key in keys[:-1]:
            config = config[key]
        config[keys[-1]] = value(config[keys[-1]]) if callable(value) else value

    return change


def edit_text(path: Path, old: str, new: str) -> None:
    """Replace a text of a file, which must have it."""
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new, 1))


def edit_table(path: Path, change: Callable[[Any], None]) -> None:
    """Change a table."""
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


@dataclass(frozen=True)
class Forgery:
    """A forged file whose digests were computed again, and whether `demur verify` finds it."""

    what: str  # target in a workspace
    name: str
    change: Callable[[Path], None]
    found: bool
    why: str


def _of_record(name: str, change: Callable[[Record], None], found: bool, why: str, what: str = "attacked", **metadata: Any) -> Forgery:  # fmt: skip  # noqa: E501
    return Forgery(what, name, lambda path: edit_record(path, change, **metadata), found, why)


def _of_guard(name: str, change: Callable[[Any], None], found: bool, why: str) -> Forgery:
    return Forgery("guard", name, lambda path: edit_config(path, change), found, why)


def _one_more(path: Path) -> None:
    edit_json(path, accepted=1 + read_json(path, REMEDY)["accepted"])


def _recipe_digest(path: Path) -> str:
    from demur.recipes import read_recipe
    from demur.spec import digest

    return digest(read_recipe(path / "recipe.txt"))


def _consistent(path: Path, threshold: float) -> None:
    """Change the threshold of a certificate and its sentence."""
    values = read_json(path, REMEDY)
    old = f"{values['thresholds'][0]:.6g}"
    sentence = values["sentence"].replace(old, f"{threshold:.6g}")
    edit_json(path, thresholds=[threshold], sentence=sentence)


FORGED = (
    _of_record("a norm above the radius", arrays(size_linf=lambda v: v + 0.1), True,
               "norms and radius of the attack"),
    _of_record("a larger radius in the spec", nothing, True, "digest of the attack",
               spec='PGD(ball=Linf(eps=0.3), steps=3, step_size=None, restarts=1, start="random", '
               'objective=CE(), keep="max_objective", criterion=Misclassified(), seed=0, '
               'decay_steps=(), decay_factor=0.1, momentum=0.0, backtrack=0.0, '
               'backtrack_objective=None)'),
    _of_record("norms of zero", arrays(size_linf=torch.zeros_like, size_l2=torch.zeros_like), True,
               "stored adversarial examples"),
    _of_record("norms that no image has", arrays(size_l2=lambda v: v * 9), True,
               "both norms of one image"),
    _of_record("a label changed", arrays(y=lambda v: (v + (torch.arange(len(v)) == 0)) % 10), True,
               "labels of other records"),
    _of_record("every image labelled as predicted", relabel, True, "labels of other records"),
    _of_record("a label that is no class", arrays(y=lambda v: v + 10), True, "number of classes"),
    _of_record("images in another order", arrays(index=lambda v: v.flip(0)), True,
               "labels of other records"),
    _of_record("every prediction correct", claim_robust, True, "outputs of the weights"),
    _of_record("outputs of one image changed", arrays(logits=lambda v: v + 9 * (
        torch.arange(len(v))[:, None] == 0) * torch.eye(10)[0]), True, "outputs of the weights"),
    _of_record("images left out", drop(50), True, "digest of the images in the data set"),
    _of_record("adversarial examples replaced by noise",
               arrays(x_adv=lambda v: torch.rand(v.shape)), True, "the ball around the images"),
    _of_record("adversarial examples replaced by the images",
               arrays(x_adv=lambda v: torch.full_like(v, 0.5)), True, "the ball around the images"),
    _of_record("another split", nothing, True, "digest of the record", split="cal"),
    _of_record("other weights", nothing, True, "weights of the run", weights="0" * 64),
    _of_record("another digest of the images", nothing, True, "digest of the record",
               data="0" * 64),
    _of_record("a threshold that the attack has not", nothing, True, "criteria of the attack",
               thresholds={"AcceptedError(RCon(), TPR(0.95))": 0.5}),
    _of_record("another label of the record", nothing, False,
               "the label is a name; the spec is checked", label="autoattack"),
    _of_record("another date and device", nothing, False, "nothing else in the folder knows them",
               created="2020-01-01T00:00:00", device="cuda (another)"),
    _of_record("a score near the decision, within rounding",
               arrays(logits=lambda v: v + 1e-5), False, "other devices round as much"),
    _of_record("a changed threshold of the attack", nothing, True, "clean cal images", "rejecting",
               thresholds={"AcceptedError(RCon(), TPR(0.95))": 0.123}),
    _of_record("an error counted as correct", flip_correct(True), True, "Con and T-Con", "scores"),
    _of_record("a correct image counted as an error", flip_correct(False), True, "Con and T-Con",
               "scores"),
    _of_record("higher T-Con of all images", edit_scores("T-Con", lambda v: v.clamp(0.9)), True,
               "Con and T-Con", "scores"),
    _of_record("another R-Con in a scores-only archive",
               edit_scores("RCon(tau=1.0)", lambda v: 1 - v), False,
               "without outputs and weights nothing gives the score", "scores"),
    _of_record("Con and T-Con changed alike in a scores-only archive", each(*(
        edit_scores(name, lambda v: v * 0.5) for name in ("Con(tau=1.0)", "T-Con"))),
        False, "without outputs nothing gives the scores", "scores"),
    _of_record("changed outputs in an archive", arrays(logits=lambda v: v.roll(1, 0)), False,
               "weights absent: nothing is attacked again", "archive"),
    Forgery("run", "other weights with their digest", lambda path: edit_weights(
        path / "model.safetensors", path / "checkpoint.json", "weights"), True,
        "weights in the records"),
    Forgery("run", "a changed recipe", lambda path: edit_text(
        path / "recipe.txt", "epochs=4", "epochs=400"), True, "digest in the checkpoint"),
    Forgery("run", "a recipe and its digest", each(
        lambda path: edit_text(path / "recipe.txt", "epochs=4", "epochs=400"),
        lambda path: edit_json(path / "checkpoint.json", recipe_digest=_recipe_digest(path))),
        False,
        "the records do not depend on the number of epochs"),
    Forgery("run", "another selected epoch", lambda path: edit_json(
        path / "checkpoint.json", epoch=99), False, "nothing else gives the epoch"),
    Forgery("certificate", "a better sentence", lambda path: edit_json(
        path, sentence="no errors at all"), True, "counts"),
    Forgery("certificate", "one more accepted image", _one_more, True,
            "intervals from counts"),
    Forgery("certificate", "other thresholds", lambda path: edit_json(path, thresholds=[0.01]),
            True, "sentence"),
    Forgery("certificate", "a lower level", lambda path: edit_json(path, level=0.001), True,
            "guarantee"),
    Forgery("certificate", "a higher confidence", lambda path: edit_json(path, confidence=0.999),
            True, "sentence and intervals"),
    Forgery("certificate", "a threshold with its sentence", lambda path: _consistent(path, 0.01),
            True, "the cal record, tested again"),
    Forgery("certificate", "another date", lambda path: edit_json(path, created="2020"), False,
            "nothing else knows it"),
    _of_guard("another threshold", put(0.01, "scores", 0, "threshold"), True, "certificate"),
    _of_guard("a threshold of null", put(None, "scores", 0, "threshold"), True, "certificate"),
    _of_guard("a better sentence", put("no errors", "calibration", "sentence"), True,
              "certificate"),
    _of_guard("a lower risk", put(0.0, "calibration", "risk", "value"), True, "counts"),
    _of_guard("a narrower interval", put(lambda v: v + 0.02, "calibration", "coverage", "lo"),
              True, "counts"),
    _of_guard("more calibration images", put(10_000, "calibration", "images"), True, "histogram"),
    _of_guard("no certificate", put(None, "calibration", "certificate"), True,
              "neither certificate nor shortfall"),
    _of_guard("a certificate with one more accepted image",
              put(lambda v: v + 1, "calibration", "certificate", "accepted"), True, "intervals"),
    _of_guard("another figure under attack", put(0.99, "figures", 0, "accuracy", "value"), True,
              "counts"),
    _of_guard("all figures under attack removed", put([], "figures"), True,
              "tables of the model card"),
    _of_guard("class names in another order", put(lambda v: v[::-1], "class_names"), False,
              "the guard holds no labelled images"),
    _of_guard("another temperature", put(3.0, "temperature"), False,
              "the guard holds no images to compare probabilities on"),
    _of_guard("the radius of the page", put(0.5, "eps"), False, "it is a setting of the service"),
    Forgery("guard", "other weights with their digest", lambda path: edit_weights(
        path / "model.safetensors", path / "config.json", "files"), False,
        "the guard holds no images to measure its figures on"),
    Forgery("guard", "a better row of the model card", lambda path: edit_text(
        path / "README.md", "| calibration, clean |", "| calibration, clean | 9 |"), True,
        "figures"),
    Forgery("guard", "the text of the model card", lambda path: edit_text(
        path / "README.md", "## Limits", "## No limits"), False, "people may edit it"),
    Forgery("state", "images outside [0, 1]", lambda path: edit_state(
        path, x_adv=lambda v: v + 2), True, "range of pixels"),
    Forgery("state", "a success of an attack that is none", lambda path: edit_state(
        path, broken_by=lambda v: v - 9), True, "numbers of attacks"),
    Forgery("state", "every image robust", lambda path: edit_state(
        path, broken_by=lambda v: torch.full_like(v, -1)), False,
        "the state holds no model; `demur audit` attacks such images again or not at all"),
    Forgery("table", "a higher accuracy", lambda path: edit_table(
        path, put(0.999, "attacks", 0, "accuracy")), True, "the record"),
    Forgery("table", "a higher AUROC", lambda path: edit_table(
        path, put(0.999, "rows", 0, "ranking", "auroc")), True, "the record"),
    Forgery("table", "a narrower interval", lambda path: edit_table(
        path, put(lambda v: v + 0.01, "rows", 0, "coverage_interval", "lo")), True, "the record"),
    Forgery("table", "a row removed", lambda path: edit_table(path, lambda t: t["rows"].pop()),
            False, "a table need not have every row"),
)  # fmt: skip


def table() -> list[str]:
    """The rows of the table of docs/reference/verify.md."""
    rows = ["| forged, with right digests | in | found | by, or why not |", "|---|---|---|---|"]
    names = {"attacked": "record", "rejecting": "record", "scores": "scores-only archive"}
    for one in FORGED:
        where = names.get(one.what, one.what)
        rows.append(f"| {one.name} | {where} | {'yes' if one.found else 'no'} | {one.why} |")
    return rows


# ---------------------------------------------------------------------------------- damaged files


def swap_halves(content: bytes) -> bytes:
    half = len(content) // 2
    return content[half:] + content[:half]


CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "without its first byte": lambda content: content[1:],
    "a byte appended": lambda content: content + b"\0",
    "a bit flipped": lambda c: (
        c[: len(c) // 3] + bytes([c[len(c) // 3] ^ 1]) + c[len(c) // 3 + 1 :]
    ),
    "zeros": lambda content: bytes(len(content)),
    "halves swapped": swap_halves,
    "twice": lambda content: content * 2,
    "as text of another system": lambda content: content.replace(b"\n", b"\r\n") + b"\r\n",
}


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


FILE: dict[str, Callable[[Path], None]] = {
    **{name: (lambda path, f=f: path.write_bytes(f(path.read_bytes())))  # type: ignore[misc]
       for name, f in CONTENT.items()},
    "deleted": Path.unlink,
    "a folder": replace_by_folder,
    "a pipe": replace_by_pipe,
    "a link to itself": replace_by_link,
}  # fmt: skip
FILES = (
    "attacked", "attacked.json", "scores", "scores.json", "archive", "archive.json",
    "run/checkpoint.json", "run/recipe.txt", "run/model.safetensors", "certificate",
    "guard/config.json", "guard/model.safetensors", "guard/README.md", "state",
)  # fmt: skip
DAMAGED = tuple((file, damage) for file in FILES for damage in FILE)


def target(place: Place, file: str) -> Path:
    """The file of a workspace that a name says."""
    if file.endswith(".json") and "/" not in file:
        return place[file.removesuffix(".json")].with_suffix(".json")
    name, _, rest = file.partition("/")
    return place[name] / rest if rest else place[name]


def copy_of(workspace: Place, root: Path, folder: Path) -> Place:
    """A copy of a workspace that may be damaged."""
    shutil.copytree(root, folder)
    return {name: folder / path.relative_to(root) for name, path in workspace.items()}


if __name__ == "__main__":
    print("\n".join(table()))
