"""A guard after its first deployment: its identity, differences, and thresholds on new images."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import demur
from demur import GDA, BadInput, Consistency, Coupled, Guard, LoadedRun
from demur.files.atomic import read_json, write_json
from demur.guards.lifecycle import describe, differences, recalibrated
from demur.rejectors import Rejector
from demur.serve import create_app
from tests.conftest import Command

ONE_AND_TWO: list[str | Rejector] = ["Con", Coupled(), GDA(), Consistency(0.05, 2, 0.03)]


@pytest.fixture
def images(tiny_source: LoadedRun) -> tuple[torch.Tensor, torch.Tensor]:
    return tiny_source.splits["cal"].batch(slice(None))


@pytest.fixture
def folder(tmp_path: Path, images: tuple[torch.Tensor, torch.Tensor]) -> Path:
    """New images, a folder per class."""
    for number, (x, y) in enumerate(zip(*images, strict=True)):
        path = tmp_path / "new" / str(int(y)) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((x[0] * 255).round().byte().numpy()).save(path)
    return tmp_path / "new"


def test_the_digest_is_that_of_what_decides(tiny_guard: Guard, tmp_path: Path) -> None:
    loaded = Guard.load(tiny_guard.save(tmp_path / "guard"))
    assert loaded.identity == tiny_guard.identity
    assert differences(tiny_guard, loaded) == {}
    names = [*loaded.class_names[1:], "other"]
    config = json.loads((tmp_path / "guard" / "config.json").read_text())
    assert (config["name"], config["version"]) == (tiny_guard.name, 1)
    assert replace(loaded, class_names=tuple(names)).digest != loaded.digest
    part = loaded.scores[0]
    other = replace(loaded, scores=(part._replace(threshold=part.threshold + 1e-9),))
    assert set(differences(loaded, other)) == {"digest"}  # too small to see in the text
    assert replace(loaded, version=2).digest == loaded.digest
    with torch.no_grad():
        next(loaded.model.parameters())[0] += 1e-6  # type: ignore[attr-defined]
    assert replace(loaded, version=1).digest != tiny_guard.digest  # computed anew


@pytest.mark.parametrize("rejector", ONE_AND_TWO, ids=str)
def test_equal_images_give_equal_thresholds(
    rejector: str | Rejector, tiny_source: LoadedRun, images: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x_fit, y_fit = tiny_source.splits["fit"].batch(slice(0, 400))
    old = demur.guard(
        tiny_source.net,
        *images,
        rejector=rejector,
        coverage=0.7,
        x_fit=x_fit,
        y_fit=y_fit,
    )
    new = recalibrated(old, *images, coverage=0.7)
    assert new.thresholds == old.thresholds
    assert new.calibration == old.calibration
    assert (new.digest, new.version) == (old.digest, 2)
    fewer = recalibrated(old, *images, coverage=0.4)
    assert fewer(images[0]).accepted.sum() < old(images[0]).accepted.sum()
    assert np.array_equal(fewer(images[0]).labels, old(images[0]).labels)


def test_the_commands_show_compare_and_recalibrate(
    tiny_guard: Guard, folder: Path, tmp_path: Path, command: Command
) -> None:
    old, new = str(tiny_guard.save(tmp_path / "guard")), str(tmp_path / "guard-2")
    code, out, error = command("guard", "info", old)
    assert code == 0, error
    assert tiny_guard.digest in out
    (folder / "0" / "damaged.png").write_bytes(b"no image")
    code, out, error = command(
        "guard", "recalibrate", old, "--data", str(folder), "--coverage", "0.5", "-o", new,
        "--accept-chance",
    )  # fmt: skip
    assert code == 0, error
    assert "left out: " in error
    code, out, _ = command("guard", "diff", old, new, "--json")
    found = json.loads(out)
    assert found["version"] == ["1", "2"]
    assert "weights" not in found
    assert found["accepts"][0] != found["accepts"][1]
    assert command("guard", "diff", old, old)[1] == "both guards are equal\n"
    assert command("verify", new)[0] == 0


def test_wrong_folders_are_one_sentence(
    tiny_guard: Guard, folder: Path, tmp_path: Path, command: Command
) -> None:
    old = str(tiny_guard.save(tmp_path / "guard"))
    shutil.copytree(folder / "0", folder / "zebra")
    (tmp_path / "empty").mkdir()
    for data, words in (
        (folder, "'zebra' is no class"), (tmp_path / "empty", "has no images"), ("no", "no such")
    ):  # fmt: skip
        code, _, error = command(
            "guard", "recalibrate", old, "--data", str(data), "-o", str(tmp_path / "new-guard")
        )
        assert code == 2
        assert words in error
        assert not (tmp_path / "new-guard").exists()
    with pytest.raises(BadInput, match="labels"):
        recalibrated(tiny_guard, torch.rand(3, *tiny_guard.shape), [0, 1])


def test_older_guards_without_a_name_open(tiny_guard: Guard, tmp_path: Path) -> None:
    path = tiny_guard.save(tmp_path / "guard") / "config.json"
    config = read_json(path, "")
    del config["name"], config["version"]
    write_json(path, config)
    assert describe(Guard.load(tmp_path / "guard"))["name"] == "guard"


def test_the_service_names_its_guard(tiny_guard: Guard) -> None:
    from starlette.testclient import TestClient

    with TestClient(create_app(tiny_guard), base_url="http://127.0.0.1") as client:
        assert client.get("/health").json()["guard"] == tiny_guard.identity
        body = {"images": np.zeros((1, 8, 8, 1)).tolist(), "dtype": "float32"}
        assert client.post("/predict", json=body).json()["guard"] == tiny_guard.identity
        assert tiny_guard.digest[:12] in client.get("/metrics").text


def test_a_guarantee_under_attack_is_not_replaced_by_one_on_clean_images(
    tiny_guard: Guard, images: tuple[torch.Tensor, torch.Tensor]
) -> None:
    known = {**tiny_guard.calibration, "certificate": {"under": "worst-score"}}
    with pytest.raises(BadInput, match="holds under worst-score"):
        recalibrated(replace(tiny_guard, calibration=known), *images)
