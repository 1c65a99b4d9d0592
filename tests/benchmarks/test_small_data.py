"""The small recipes on the three synthetic sets, in small; with DEMUR_EXHAUSTIVE=1 in full."""

import json
from pathlib import Path

import numpy as np
import pytest

import small_data
from demur.calibrate import ChanceTest
from small_data import CLASSES, SETS, measure, program, write_set
from tests.benchmarks.conftest import Script

BEHIND = {"shapes": 25, "textures": 5, "colours": 5}  # points; SGD learns shapes slowly
BRIEF = ["size=8", "width=6", "epochs=5", "epoch_images=120"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", SETS)
def test_the_sets_are_fixed_balanced_and_without_duplicates(name: str, tmp_path: Path) -> None:
    files = [np.load(write_set(tmp_path / f"{k}.npz", name, 8, 4)) for k in (0, 1)]
    assert all(np.array_equal(files[0][key], files[1][key]) for key in files[0])
    assert np.bincount(files[0]["y_train"]).tolist() == [8] * CLASSES
    x = np.concatenate([files[0]["x_train"], files[0]["x_test"]]).reshape(12 * CLASSES, -1)
    assert len(np.unique(x, axis=0)) == len(x)


def test_the_recipe_learns_from_little_and_stays_near_a_plain_net(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_data, "TEST", 20)
    changes = [word for change in BRIEF for word in ("--change", change)]
    words = ["--set", "colours", "--images", "24", "--eps", "2", *changes, "-o", "out.json"]
    code, out, err = script(program, *words)
    assert code == 0, err
    rows = json.loads(Path("out.json").read_text())
    assert [json.loads(line) for line in out.splitlines()] == rows
    assert [row["net"] for row in rows] == ["plain", "standard", "pgdat-rr"]
    for row in rows:
        right = round(row["clean"] * row["test"] / 100)
        assert ChanceTest.of(right, np.arange(row["test"]) % CLASSES, CLASSES, "test").passed, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SETS)
def test_clean_accuracy_is_near_that_of_a_plain_net(name: str, tmp_path: Path) -> None:
    path = write_set(tmp_path / f"{name}.npz", name, 81)
    plain, robust = (measure(path, *what, []) for what in (("plain", 0), ("pgdat-rr", 2)))
    assert robust["clean"] >= plain["clean"] - BEHIND[name]
    assert robust["minutes"] <= 8
