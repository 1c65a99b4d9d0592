"""Run folders: atomic files, damage noticed, one writer, another recipe refused."""

import os
from pathlib import Path

import pytest
import torch

from demur.errors import BadInput
from demur.recipes import Recipe, recipe
from demur.runs import Run, code_version, provenance, run_folder
from demur.runs.files import (
    only_writer,
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
)  # fmt: skip
from demur.runs.record import Record, read_record, write_record
from demur.spec import digest


def spoil(path: Path, place: int = -1) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
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


def test_a_changed_bit_is_noticed_and_both_digests_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    expected = write_tensors(path, {"w": torch.ones(3)})
    assert torch.equal(read_tensors(path, expected)["w"], torch.ones(3))
    spoil(path)
    with pytest.raises(BadInput) as error:
        read_tensors(path, expected)
    assert str(path) in str(error.value)
    assert f"expected digest {expected[:16]}" in str(error.value)
    assert "found " in str(error.value)
    path.unlink()
    with pytest.raises(BadInput, match="missing"):
        read_tensors(path, expected)


def test_damaged_json_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    assert read_json(tmp_path / "a.json") == {"a": 1}
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(BadInput, match="damaged"):
        read_json(tmp_path / "a.json")


def test_a_second_writer_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    with (
        only_writer(tmp_path),
        pytest.raises(BadInput, match="another process is writing"),
        only_writer(tmp_path),
    ):
        raise AssertionError("two writers")
    with only_writer(tmp_path):
        pass


def test_a_record_survives_the_disk_and_notices_damage(tmp_path: Path) -> None:
    arrays = {"y": torch.tensor([1, 0]), "logits": torch.eye(2), "aux": torch.zeros(2, 0)}
    record = Record(arrays, {"label": "pgd-20", "digest": "d"})
    path = tmp_path / "pgd-20-test-d.npz"
    write_record(path, record)
    back = read_record(path)
    assert all(torch.equal(back.arrays[k], v) for k, v in arrays.items())
    assert back.label == "pgd-20"
    assert back.correct.tolist() == [False, False]
    spoil(path, 40)
    with pytest.raises(BadInput, match=r"pgd-20-test-d\.npz is damaged: expected digest"):
        read_record(path)


def test_a_run_of_another_recipe_is_refused_with_the_differing_fields(tmp_path: Path) -> None:
    first = recipe("digits-pgdat-rr")
    run = Run.prepare(tmp_path / "run", first)
    assert run.recipe == first
    assert Run.prepare(tmp_path / "run", first).recipe == first
    other = recipe("digits-pgdat-rr", ["epochs=3", "head.weight=0.5"])
    with pytest.raises(BadInput) as error:
        Run.prepare(tmp_path / "run", other)
    assert "method.head.weight: 0.5 asked, 1.0 found" in str(error.value)
    assert "epochs: 3 asked" in str(error.value)
    assert Run(tmp_path / "run").recipe == first


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(BadInput, match="not empty and not a run"):
        Run.prepare(tmp_path, recipe("digits-pgdat-rr"))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_changed_recipes_get_their_own_folder() -> None:
    plain, changed = recipe("digits-pgdat"), recipe("digits-pgdat", ["epochs=3"])
    assert run_folder("digits-pgdat", plain, changed=False) == Path("runs/digits-pgdat")
    name = f"runs/digits-pgdat-{digest(changed)[:6]}"
    assert run_folder("digits-pgdat", changed, changed=True) == Path(name)


def test_damaged_weights_are_refused(tiny_run: Run, tmp_path: Path) -> None:
    import shutil

    copy = Run(Path(shutil.copytree(tiny_run.path, tmp_path / "copy")))
    spoil(copy.path / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors is damaged: expected digest"):
        copy.net(torch.device("cpu"))


def test_an_unknown_or_unfinished_run_says_what_to_do(tmp_path: Path, tiny_recipe: Recipe) -> None:
    with pytest.raises(BadInput, match="demur train"):
        Run.open("nowhere", home=tmp_path)
    Run.prepare(tmp_path / "digits-a", tiny_recipe)
    with pytest.raises(BadInput, match="did you mean digits-a"):
        Run.open("digits-b", home=tmp_path)
    with pytest.raises(BadInput, match="not trained to the end"):
        _ = Run.open("digits-a", home=tmp_path).chosen


def test_provenance_names_code_libraries_and_device() -> None:
    story = provenance(torch.device("cpu"))
    assert story["torch"] == torch.__version__
    assert str(story["device"]).startswith("cpu")
    assert story["code"] == code_version()
    assert "src" in code_version()
