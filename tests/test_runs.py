"""Run folders: atomic files, detected damage, one writer, one recipe."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import demur.runs.run as run_module
from demur.errors import BadInput
from demur.files.checked_files import (
    exclusive_lock,
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
)
from demur.recipes import Recipe, recipe
from demur.runs import Run, provenance, run_folder
from demur.runs.record import Record, read_record, write_record
from demur.spec import digest, lines
from demur.version import code_version
from tests import forked
from tests.conftest import Command
from tests.test_crash import made_up_record

REMEDY = "restore it"


def spoil(path: Path, position: int = -1) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_files_have_the_users_usual_permissions(tmp_path: Path) -> None:
    write_bytes(tmp_path / "ours", b"")
    (tmp_path / "theirs").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_a_changed_bit_is_detected_and_both_digests_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    expected = write_tensors(path, {"w": torch.ones(3)})
    assert torch.equal(
        read_tensors(path, expected, REMEDY, {"w": torch.ones(3)})["w"], torch.ones(3)
    )
    spoil(path)
    with pytest.raises(BadInput) as error:
        read_tensors(path, expected, REMEDY, {"w": torch.ones(3)})
    assert str(path) in str(error.value)
    assert f"expected digest {expected[:16]}" in str(error.value)
    assert "found " in str(error.value)
    path.unlink()
    with pytest.raises(BadInput, match="missing"):
        read_tensors(path, expected, REMEDY, {"w": torch.ones(3)})


def test_metadata_contains_its_own_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"epoch": 1, "why": "b"})
    assert read_json(path, REMEDY) == {"epoch": 1, "why": "b"}
    path.write_text(path.read_text().replace('"epoch": 1', '"epoch": 2'))
    with pytest.raises(
        BadInput, match=r"a\.json is damaged: expected digest .*, found .*; restore"
    ):
        read_json(path, REMEDY)
    for content in ("{", "{}", "[]", "3", '"x"'):
        path.write_text(content)
        with pytest.raises(BadInput, match="damaged: it contains no digest; restore it"):
            read_json(path, REMEDY)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="damaged"):
        read_json(path, REMEDY)


def test_a_second_process_cannot_take_the_lock(tmp_path: Path) -> None:
    script = "from pathlib import Path; from demur.files.checked_files import exclusive_lock\n"
    script += f"with exclusive_lock(Path({str(tmp_path)!r})): pass"
    second = ["-c", script]
    with exclusive_lock(tmp_path), exclusive_lock(tmp_path):  # one process may hold it twice
        refused = forked.run(second)
        assert "another process is writing" in refused.stderr
    assert forked.run(second).returncode == 0


def test_a_folder_deleted_before_its_lock_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = tmp_path / "folder", list[str]()
    really = os.open

    def deleted_once(path: str, *rest: int) -> int:
        opened.append(str(path))
        if len(opened) == 1:
            folder.rmdir()
        return really(path, *rest)

    monkeypatch.setattr(os, "open", deleted_once)
    with exclusive_lock(folder):
        assert opened == [str(folder / ".lock")] * 2
        assert (folder / ".lock").is_file()


@pytest.mark.parametrize("tight", [False, True])
def test_a_record_is_read_back_and_damage_is_detected(tmp_path: Path, tight: bool) -> None:
    record = made_up_record("pgd-20", "d")
    path, arrays = tmp_path / "pgd-20-test-d.npz", record.arrays
    write_record(path, record, tight)
    back = read_record(path)
    assert all(torch.equal(back.arrays[k], v) for k, v in arrays.items())
    assert back.label == "pgd-20"
    assert back.correct.tolist() == [False, False]
    spoil(path, 40)
    with pytest.raises(BadInput, match=r"pgd-20-test-d\.npz is damaged: expected digest"):
        read_record(path)


def test_a_tight_record_is_smaller_and_readable_by_numpy(tmp_path: Path) -> None:
    scores = torch.rand(3, 4000, generator=torch.Generator().manual_seed(0))
    arrays = {"y": torch.arange(4000) % 10, "index": torch.arange(4000), "scores": scores}
    record = Record(arrays, {"label": "clean", "digest": "d"})
    loose, tight = tmp_path / "loose.npz", tmp_path / "tight.npz"
    write_record(loose, record)
    write_record(tight, record, tight=True)
    assert tight.stat().st_size < loose.stat().st_size
    with np.load(tight) as stored:
        # of consecutive images only the first index is stored, in the metadata
        assert set(stored.files) == set(arrays) - {"index"}
        assert all(np.array_equal(stored[name], arrays[name].numpy()) for name in stored.files)
    again = tmp_path / "again.npz"
    write_record(again, record, tight=True)
    assert again.read_bytes() == tight.read_bytes()


def test_the_repr_of_a_record_is_three_short_lines() -> None:
    arrays = {"y": torch.tensor([1, 0]), "logits": torch.eye(2), "aux": torch.zeros(2, 0)}
    metadata = {"label": "pgd-20", "split": "test", "digest": 64 * "d", "created": "2024-05-01",
                "device": "cpu (x86_64)"}  # fmt: skip
    first, second, third = repr(Record(arrays, metadata)).splitlines()
    assert first == ("Record('pgd-20', split='test', n=2, accuracy=0.0%, digest='dddddddddddd',")
    assert second == "  arrays: y(2,), logits(2, 2), aux(2, 0),"
    assert third == "  created 2024-05-01 on cpu (x86_64))"
    many = arrays | {f"an array with a long name {i}": torch.zeros(2) for i in range(9)}
    for record in (Record(many, metadata | {"label": 99 * "x\n"}), Record({}, {})):
        lines = repr(record).splitlines()
        assert len(lines) == 3
        assert max(map(len, lines)) <= 100


def claim_run(path: Path, wanted: Recipe) -> Run:
    with Run.claim(path, wanted) as run:
        return run


def test_a_run_of_another_recipe_raises_with_the_differing_fields(tmp_path: Path) -> None:
    first = recipe("digits-pgdat-rr")
    assert claim_run(tmp_path / "run", first).recipe == first
    assert claim_run(tmp_path / "run", first).recipe == first
    other = recipe("digits-pgdat-rr", ["epochs=3", "head.weight=0.5"])
    with pytest.raises(BadInput) as error:
        claim_run(tmp_path / "run", other)
    assert "method.head.weight: 0.5 asked, 1.0 found" in str(error.value)
    assert "epochs: 3 asked" in str(error.value)
    assert Run(tmp_path / "run").recipe == first


def test_a_recipe_that_changes_before_the_lock_is_taken_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes its recipe between our check and our lock."""
    folder, real = tmp_path / "run", exclusive_lock

    @contextmanager
    def late(path: Path) -> Iterator[None]:
        path.mkdir()
        (path / "recipe.txt").write_text(lines(recipe("digits-standard")))
        with real(path):
            yield

    monkeypatch.setattr(run_module, "exclusive_lock", late)
    with pytest.raises(BadInput, match="another recipe"):
        claim_run(folder, recipe("digits-pgdat-rr"))
    assert Run(folder).recipe == recipe("digits-standard")
    assert Run(str(folder)) == Run(folder)  # type: ignore[arg-type]


def test_a_folder_that_is_not_a_run_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(BadInput, match=r"in the way|is a file"):
            claim_run(path, recipe("digits-pgdat-rr"))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_recipes_raise(tiny_run: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_run.path, tmp_path / "copy"))
    text = (copy / "recipe.txt").read_text()
    (copy / "recipe.txt").write_text(text.replace("epochs=6", "epochs=5"))
    with pytest.raises(
        BadInput, match=r"recipe\.txt is not the recipe .* expected digest .* found"
    ):
        _ = Run(copy).checkpoint
    for content in (b"\xff\xfe\x00", b"Recipe(", b"ResNet8()"):
        (copy / "recipe.txt").write_bytes(content)
        with pytest.raises(BadInput, match=r"recipe\.txt"):
            _ = Run(copy).recipe


def test_a_run_is_named_by_dots(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    home = Path(shutil.copytree(tiny_run.path, tmp_path / "mine"))
    (home / "records").mkdir(exist_ok=True)
    for inside, name in ((".", "."), ("records", ".."), (".", "records/..")):
        monkeypatch.chdir(home / inside)
        assert Run.open(name).name == "mine"
        code, out, err = command("list", name)
        assert code == 0, err
        assert "PGD" in out
        code, _, err = command("score", name, "--split", "val")
        assert (code, "demur attack" in err) == (2, True)
        assert f"demur attack {home}" in err  # which works from anywhere


def test_changed_recipes_get_their_own_folder() -> None:
    plain, changed = recipe("digits-pgdat"), recipe("digits-pgdat", ["epochs=3"])
    assert run_folder("digits-pgdat", plain, changed=False) == Path("runs/digits-pgdat")
    assert run_folder("@mine/big.txt", plain, changed=False) == Path("runs/big")
    assert run_folder("@results/first/recipe.txt", plain, changed=False) == Path("runs/first")
    name = f"runs/digits-pgdat-{digest(changed)[:6]}"
    assert run_folder("digits-pgdat", changed, changed=True) == Path(name)


def test_damaged_or_missing_weights_raise(tiny_run: Run, tmp_path: Path) -> None:
    copy = Run(Path(shutil.copytree(tiny_run.path, tmp_path / "copy")))
    spoil(copy.path / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors is damaged: expected digest"):
        copy.net(torch.device("cpu"))
    (copy.path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="contains records without weights"):
        copy.net(torch.device("cpu"))


def test_an_unknown_or_unfinished_run_says_what_to_do(tmp_path: Path, tiny_recipe: Recipe) -> None:
    with pytest.raises(BadInput, match="demur train"):
        Run.open("nowhere", home=tmp_path)
    claim_run(tmp_path / "digits-a", tiny_recipe)
    with pytest.raises(BadInput, match="did you mean digits-a"):
        Run.open("digits-b", home=tmp_path)
    with pytest.raises(BadInput, match="not trained to the end"):
        _ = Run.open("digits-a", home=tmp_path).checkpoint


def test_provenance_names_code_libraries_and_device() -> None:
    metadata = provenance(torch.device("cpu"))
    assert metadata["torch"] == torch.__version__
    assert str(metadata["device"]).startswith("cpu")
    assert metadata["code"] == code_version()
    assert "src" in code_version()
