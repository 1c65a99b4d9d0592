"""Archives of runs: the same tables without weights, data or features."""

import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from demur.attacks import Clean
from demur.calibrate import TPR
from demur.data import Digits, Splits
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, archive, run_attack
from demur.evaluate.certificates import issue
from demur.files.checked_files import write_json
from demur.paper.paper_runs import StoredRuns
from demur.rejectors import paper_grid
from demur.runs import Run
from demur.runs.record import read_record, record_path, write_record
from demur.spec import show
from tests.test_crash import made_up_record


def test_an_archive_gives_the_same_tables_without_weights_or_data(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    target = tmp_path / "kept" / "archive"
    archived = archive(scored_source, target)
    assert not (target / "model.safetensors").exists()
    assert all("feature" not in r.arrays and "x_adv" not in r.arrays for r in archived.records())
    for wanted in (None, paper_grid(Digits())):
        whole = RejectorEvaluation.of(scored_source, rejectors=wanted)
        again = RejectorEvaluation.of(NoData(archived, torch.device("cpu")), rejectors=wanted)
        assert again.thresholds == whole.thresholds
        for one, other in zip(scored_source.run.records(), archived.records(), strict=True):
            pairs = ((whole, one), (again, other))
            rows = [[row.to_json() for row in s.score_record(record).rows] for s, record in pairs]
            assert rows[0] == rows[1]


class NoData(LoadedRun):
    """An evaluator on a machine without the data set."""

    @property
    def splits(self) -> Splits:
        raise AssertionError("images of an archive were loaded")


def test_an_archive_of_an_archive_is_the_same(scored_source: LoadedRun, tmp_path: Path) -> None:
    once = archive(scored_source, tmp_path / "once")
    twice = archive(NoData(once, torch.device("cpu")), tmp_path / "twice")
    for one, other in zip(once.records(), twice.records(), strict=True):
        assert list(one.stored_scores) == list(other.stored_scores) != []
        assert all(
            torch.equal(one.stored_scores[text], other.stored_scores[text])
            for text in one.stored_scores
        )
        assert one.metadata["scores_fitted"] == other.metadata["scores_fitted"]


@pytest.mark.parametrize("first", [0, 50_000])
def test_an_archived_record_of_consecutive_images_stores_its_first_index(
    first: int, tmp_path: Path
) -> None:
    made = made_up_record("clean", 64 * "a")
    made.arrays["index"] += first
    path = record_path(tmp_path, "clean", "test", 64 * "a")
    write_record(path, made, tight=True)
    with np.load(path) as file:
        assert set(file.files) == set(made.arrays) - {"index"}
        assert all(np.array_equal(file[name], made.arrays[name].numpy()) for name in file.files)
    again = read_record(path)
    assert all(torch.equal(again.arrays[name], made.arrays[name]) for name in made.arrays)
    assert "first_index" not in again.metadata
    made.arrays["index"] = torch.tensor([first, first + 2])
    write_record(path, made, tight=True)
    assert torch.equal(read_record(path).arrays["index"], made.arrays["index"])


def test_an_impossible_first_index_is_rejected(tmp_path: Path) -> None:
    path = record_path(tmp_path, "clean", "test", 64 * "a")
    write_record(path, made_up_record("clean", 64 * "a"), tight=True)
    metadata = json.loads(path.with_suffix(".json").read_text())
    del metadata["metadata_digest"]
    write_json(path.with_suffix(".json"), metadata | {"first_index": 2**63 - 1})
    with pytest.raises(BadInput, match="is no index"):
        read_record(path)


def test_an_archive_never_overwrites_a_folder(
    scored_source: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match="is in the way"):
        archive(scored_source, tmp_path / "there")
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["mine.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    monkeypatch.chdir(tmp_path / "there")
    for place in (".", "/"):
        with pytest.raises(BadInput, match="is in the way"):
            archive(scored_source, Path(place))


def test_again_replaces_only_an_archive_of_the_same_run_with_nothing_more(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    target = tmp_path / "copy"
    archive(scored_source, target, ["R-Con"])
    with pytest.raises(BadInput, match="is in the way"):
        archive(scored_source, target, ["R-Con", "GDA"])
    made = archive(scored_source, target, ["R-Con", "GDA"], again=True)
    assert all(record.scores_only and len(record.stored_scores) == 4 for record in made.records())
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    with pytest.raises(BadInput, match="keeps more of clean than this copy would"):
        archive(scored_source, target, ["R-Con"], again=True)
    made = archive(scored_source, target, again=True)
    assert not any(record.scores_only for record in made.records())
    with pytest.raises(BadInput, match="keeps more of clean than this copy would"):
        archive(scored_source, target, ["R-Con"], again=True)
    recipe = target / "recipe.txt"
    recipe.write_text(show(replace(made.recipe, seed=7)))
    before = recipe.read_bytes()
    with pytest.raises(BadInput, match="is in the way"):
        archive(scored_source, target, again=True)
    assert recipe.read_bytes() == before


def test_a_run_is_never_replaced_by_its_own_archive(own_source: LoadedRun, tmp_path: Path) -> None:
    run_attack(own_source, "clean", Clean(), RecordOptions(n=40))
    before = sorted(own_source.run.path.rglob("*"))
    with pytest.raises(BadInput, match="is in the way"):
        archive(own_source, own_source.run.path, again=True)
    assert sorted(own_source.run.path.rglob("*")) == before


def test_a_symbolic_link_stays_and_a_second_process_is_rejected(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    archive(scored_source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert len(Run(tmp_path / "real").records()) == 2
    lock = tmp_path / ".copy.making" / ".lock"
    lock.parent.mkdir()
    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process is writing"):
            archive(scored_source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_certificates_are_copied_and_a_damaged_one_is_named(
    own_source: LoadedRun, tmp_path: Path
) -> None:
    run_attack(own_source, "clean", Clean(), RecordOptions(n=40))
    issue(own_source, "R-Con", TPR(0.8))
    (made,) = (own_source.run.path / "certificates").iterdir()
    (copied,) = (archive(own_source, tmp_path / "copy").path / "certificates").iterdir()
    assert copied.name == made.name
    assert copied.read_bytes() == made.read_bytes()
    made.write_text(made.read_text().replace('"rejector": "R-Con"', '"rejector": "Con"'))
    with pytest.raises(BadInput, match=rf"{made.name} is damaged: .*demur calibrate"):
        archive(own_source, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "own"]


def test_a_failed_archive_leaves_only_the_earlier_one(
    scored_source: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "copy"
    for earlier in (False, True):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "fsync", full)
            archive(scored_source, target, again=True)
        assert [path.name for path in tmp_path.iterdir()] == (["copy"] if earlier else [])
        archive(scored_source, target, again=True)
    assert len(Run(target).records()) == 2


def test_a_killed_archive_leaves_no_run_and_is_cleaned_up_next_time(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    half, old = (tmp_path / ".copy.making" / part for part in ("half", "old"))
    shutil.copytree(scored_source.run.path, half)
    with pytest.raises(BadInput, match="holds no run"):
        StoredRuns(tmp_path, lambda run: scored_source, print)
    with pytest.raises(BadInput, match="train one first"):
        Run.open("copy", home=tmp_path)
    made = archive(scored_source, tmp_path / "copy").path
    old.parent.mkdir()
    made.replace(old)  # killed between two moves
    with pytest.raises(BadInput, match="is in the way"):
        archive(scored_source, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"], "the earlier one came back"
    assert len(Run(tmp_path / "copy").records()) == 2
