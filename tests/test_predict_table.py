"""Tables of predictions: every format has the same rows, and a killed command resumes."""

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from demur import Guard
from demur.guards import predictions
from demur.guards.predictions import Row, find_images, predict_files, write_predictions
from tests.conftest import Command


@pytest.fixture
def photos(tmp_path: Path, tiny_guard: Guard, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eleven images, one of them damaged, in parts of four."""
    monkeypatch.setattr(predictions, "PART", 4)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, x in enumerate(torch.rand(10, *tiny_guard.shape[1:])):
        Image.fromarray((x * 255).byte().numpy()).save(folder / f"{number}.png")
    (folder / "damaged.png").write_bytes(b"no image")
    return folder


def test_every_format_has_the_same_rows(photos: Path, tiny_guard: Guard, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = find_images([str(photos)])
    tables = {}
    for suffix in (".csv", ".json", ".parquet"):
        out = tmp_path / f"answers{suffix}"
        counts = write_predictions(tiny_guard, paths, out, rejected=tmp_path / f"look{suffix}")
        assert sum(counts.values()) == len(paths) == 11
        assert counts["unreadable"] == 1
        assert not list(tmp_path.glob("*.parts"))
    tables[".csv"] = list(csv.DictReader((tmp_path / "answers.csv").open()))
    tables[".json"] = json.loads((tmp_path / "answers.json").read_text())
    tables[".parquet"] = parquet.read_table(tmp_path / "answers.parquet").to_pylist()
    name = tiny_guard.scores[0].name
    for a, b, c in zip(*tables.values(), strict=True):
        assert a["file"] == b["file"] == c["file"]
        assert a["guard"] == b["guard"] == c["guard"] == tiny_guard.identity
        if b["error"] is None:
            assert float(a[name]) == b["scores"][name] == c[name]
            assert a["accepted"] == str(b["accepted"]) == str(c["accepted"])
    look = json.loads((tmp_path / "look.json").read_text())
    assert look == [row for row in tables[".json"] if not row["accepted"]]
    assert json.loads(json.dumps(tables[".json"]))  # one list


def test_parts_of_a_stopped_command_are_used_again(
    photos: Path, tiny_guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, out, whole = find_images([str(photos)]), tmp_path / "a.csv", tmp_path / "b.csv"
    seen: list[Path] = []
    predict = predict_files

    def stopped(guard: Guard, some: list[Path]) -> list[Row]:
        if len(seen) == 8:
            raise KeyboardInterrupt
        seen.extend(some)
        return predict(guard, some)

    monkeypatch.setattr(predictions, "predict_files", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_predictions(tiny_guard, paths, out)
    assert not out.exists()
    seen.clear()
    (photos / "0.png").write_bytes((photos / "1.png").read_bytes())  # changed since
    write_predictions(tiny_guard, paths, out)
    assert len(seen) == 7  # the first part, which has the changed file, and the last
    monkeypatch.setattr(predictions, "predict_files", predict)
    write_predictions(tiny_guard, paths, whole)
    assert out.read_text() == whole.read_text()


def test_standard_output(photos: Path, tiny_guard: Guard, tmp_path: Path, command: Command) -> None:
    guard = str(tiny_guard.save(tmp_path / "guard"))
    code, out, error = command("predict", guard, str(photos))
    assert code == 0
    assert len(out.splitlines()) == 12
    assert "damaged.png" in error
    assert len(json.loads(command("predict", guard, str(photos), "--json")[1])) == 11
    code, _, error = command("predict", guard, str(photos), "-o", "answers.xyz")
    assert code == 2
    assert "answers.xyz is no .csv, .json or .parquet file" in error
