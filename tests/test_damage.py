"""Runs with a missing file or a missing key: one sentence names it."""

from pathlib import Path

import pytest

from demur.attacks import PGD, Clean
from demur.attacks.balls import Linf
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, run_attack
from demur.files.checked_files import read_json, write_json
from tests.conftest import Command
from tests.test_cli import expect_error


def test_a_record_without_its_arrays_is_named(own_source: LoadedRun, command: Command) -> None:
    run_attack(own_source, "clean", Clean(), RecordOptions(n=30))
    run_attack(own_source, "pgd-1", PGD(Linf(0.1), steps=1), RecordOptions(n=30))
    (arrays,) = own_source.run.records_folder.glob("pgd-1-test-*.npz")
    arrays.unlink()
    metadata = arrays.with_suffix(".json").name
    words = (f"{arrays} is missing, though {metadata} is there", "demur attack")
    for asked in ("score", "report", "paper study theory"):
        expect_error(command(*asked.split(), str(own_source.run.path)), *words)
    # the attack makes the record again
    run_attack(own_source, "pgd-1", PGD(Linf(0.1), steps=1), RecordOptions(n=30))
    assert len(own_source.run.records()) == 2


def test_a_record_without_metadata_is_reported_and_left_out(
    own_source: LoadedRun, command: Command
) -> None:
    run_attack(own_source, "clean", Clean(), RecordOptions(n=30))
    run_attack(own_source, "pgd-1", PGD(Linf(0.1), steps=1), RecordOptions(n=30))
    (metadata,) = own_source.run.records_folder.glob("pgd-1-test-*.json")
    metadata.unlink()
    arrays = metadata.with_suffix(".npz")
    code, out, err = command("score", str(own_source.run.path))
    assert code == 0
    assert f"{arrays} is ignored: its metadata file {metadata.name} is missing\n" in err
    assert "pgd-1, n=30" not in out
    assert "clean, n=30" in out
    # the attack makes the record again
    run_attack(own_source, "pgd-1", PGD(Linf(0.1), steps=1), RecordOptions(n=30))
    assert "left out" not in command("score", str(own_source.run.path))[2]


def delete_key(path: Path, key: str) -> None:
    """Delete a key of a metadata file and update the digest."""
    metadata = read_json(path, "restore it")
    del metadata[key]
    write_json(path, metadata)


def test_a_missing_key_is_named(own_source: LoadedRun, command: Command) -> None:
    run_attack(own_source, "clean", Clean(), RecordOptions(n=30))
    run = own_source.run
    scored = ("score", str(run.path))
    (record,) = run.records_folder.glob("clean-test-*.json")
    whole = {path: path.read_bytes() for path in (record, run.path / "checkpoint.json")}
    for path, keys in (
        (record, ("label", "split", "created", "weights", "file_digest", "attack", "features")),
        (run.path / "checkpoint.json", ("weights", "epoch", "recipe_digest")),
    ):
        for key in keys:
            delete_key(path, key)
            asked = (
                ("attack", str(run.path), "pgd-10") if key == "epoch" else ("score", str(run.path))
            )
            expect_error(command(*asked), f"{path.name} is damaged: the key '{key}' is missing; ")
            path.write_bytes(whole[path])
    assert command(*scored)[0] == 0


def test_a_record_is_never_believed_by_its_file_name(
    own_source: LoadedRun, command: Command
) -> None:
    """Swapped files, each of which is undamaged, are refused by every reader."""
    run_attack(own_source, "clean", Clean(), RecordOptions(n=30))
    run_attack(own_source, "pgd-1", PGD(Linf(0.1), steps=1), RecordOptions(n=30))
    folder = own_source.run.records_folder
    (clean,), (attacked,) = folder.glob("clean-test-*.npz"), folder.glob("pgd-1-test-*.npz")
    for suffix in (".npz", ".json"):
        first, second = clean.with_suffix(suffix), attacked.with_suffix(suffix)
        aside = first.rename(folder / "aside")
        second.rename(first)
        aside.rename(second)
    path = str(own_source.run.path)
    for verb in ("score", "report", "paper study theory"):
        expect_error(command(*verb.split(), path), "holds the record that belongs in")
    with pytest.raises(BadInput, match="holds the record that belongs in"):
        run_attack(own_source, "clean", Clean(), RecordOptions(n=30))


@pytest.mark.parametrize("name", ["model.safetensors", "recipe.txt", "records/new.html"])
def test_an_output_never_replaces_a_file_of_a_run(
    name: str, own_source: LoadedRun, command: Command
) -> None:
    target = own_source.run.path / name
    before = target.read_bytes() if target.exists() else None
    for words in (
        ("report", str(own_source.run.path)),
        ("paper", "study", "theory", str(own_source.run.path)),
    ):
        expect_error(
            command(*words, "-o", str(target)), "is in the run own; name a path outside of it"
        )
    assert (target.read_bytes() if target.exists() else None) == before
