"""A guard after its first deployment: its identity, differences, and thresholds on new images."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import demur
from demur import GDA, BadInput, Consistency, Coupled, Guard, LoadedRun
from demur.data import SplitName
from demur.files.checked_files import read_json, write_json
from demur.guards.lifecycle import describe, differences, recalibrated
from demur.metrics.thresholds import ANY_SCORE
from demur.rejectors import Rejector
from demur.serve import create_app
from tests.conftest import Command

ONE_AND_TWO: list[str | Rejector] = ["Con", Coupled(), GDA(), Consistency(0.05, 2, 0.03)]


@pytest.fixture
def images(tiny_source: LoadedRun) -> tuple[torch.Tensor, torch.Tensor]:
    return tiny_source.splits["cal"].batch(slice(None))


def write_images(folder: Path, x: torch.Tensor, y: torch.Tensor) -> Path:
    for number, (pixels, label) in enumerate(zip(x, y, strict=True)):
        path = folder / str(int(label)) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels[0] * 255).round().byte().numpy()).save(path)
    return folder


@pytest.fixture
def folder(tmp_path: Path, images: tuple[torch.Tensor, torch.Tensor]) -> Path:
    """New images, a folder per class."""
    return write_images(tmp_path / "new", *images)


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
        tiny_source.net, *images, rejector=rejector, coverage=0.7, x_fit=x_fit, y_fit=y_fit
    )
    new = recalibrated(old, *images, coverage=0.7)
    assert new.thresholds == old.thresholds
    assert new.calibration == old.calibration
    assert (new.digest, new.version) == (old.digest, 2)
    fewer = recalibrated(old, *images, coverage=0.4)
    assert fewer(images[0]).accepted.sum() < old(images[0]).accepted.sum()
    assert np.array_equal(fewer(images[0]).labels, old(images[0]).labels)


def test_without_a_guarantee_that_of_the_guard_is_asked_again(
    tiny_source: LoadedRun, images: tuple[torch.Tensor, torch.Tensor]
) -> None:
    old = demur.guard(tiny_source.net, *images, risk=0.6, confidence=0.9)
    new = recalibrated(old, *images)
    assert new.calibration == old.calibration
    assert "at most 60% wrong among the accepted with 90% confidence" in new.guarantee_text
    assert "% of the calibration images; " in new.summary


def test_labels_of_other_classes_are_named_before_a_risk(
    tiny_guard: Guard, images: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, y = images
    with pytest.raises(BadInput, match=r"not shown to be better than chance .*; check the labels"):
        recalibrated(tiny_guard, x, (y + 1) % 10, risk=0.05)


def test_swapped_classes_are_named(
    tiny_guard: Guard, images: tuple[torch.Tensor, torch.Tensor], tmp_path: Path, command: Command
) -> None:
    x, y = images
    right = torch.tensor(tiny_guard(x).labels) == y
    x, y = x[right], y[right]
    (one, _), (two, _) = Counter(y.tolist()).most_common(2)
    swapped = torch.where(y == one, two, torch.where(y == two, one, y))
    new, old = write_images(tmp_path / "new", x, swapped), tiny_guard.save(tmp_path / "guard")
    words = ("guard", "recalibrate", str(old), "--data", str(new), "-o", str(tmp_path / "guard-2"))
    for level, expected in (("--coverage=0.5", 0), ("--risk=0.001", 2)):
        code, _, error = command(*words, level, "--accept-chance")
        assert code == expected, error
        assert error.count("check their labels") >= 2, "also where the risk cannot be certified"
        assert error.count("no threshold gives") == (code == 2)
        shutil.rmtree(tmp_path / "guard-2", ignore_errors=True)
    names = [f"{a} are predicted as {b}; check their labels" for a, b in ((one, two), (two, one))]
    assert [name in " ".join(error.split()) for name in names] == [True, True]


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


@pytest.mark.parametrize("split", ["fit", "val"])
def test_training_images_are_refused(
    split: SplitName, tiny_source: LoadedRun, folder: Path, tmp_path: Path, command: Command
) -> None:
    made = Guard.from_run(tiny_source, coverage=0.7, accept_chance=True)
    old, new = str(made.save(tmp_path / "guard")), tmp_path / "guard-2"
    loaded = Guard.load(old)
    assert loaded.training_images is not None
    x, y = tiny_source.splits[split].batch(slice(0, 30))
    with pytest.raises(BadInput, match="30 of 30 images were used in training, such as image 0"):
        recalibrated(loaded, x, y)
    words = ("guard", "recalibrate", old, "--coverage", "0.5", "--accept-chance", "-o", str(new))
    code, _, error = command(*words, "--data", str(folder))  # cal images are no training images
    assert code == 0, error
    assert "lists no training" not in error
    assert command("verify", str(new))[0] == 0
    mixed = write_images(tmp_path / "mixed", x[:3], y[:3])
    shutil.copytree(folder, mixed, dirs_exist_ok=True)
    code, _, error = command(*words[:-1], str(tmp_path / "guard-3"), "--data", str(mixed))
    assert code == 2
    assert " images were used in training, such as " in error
    assert str(mixed) in error
    assert "leave them out" in error
    assert not (tmp_path / "guard-3").exists()


def test_a_damaged_list_of_training_images_is_one_sentence(
    tiny_source: LoadedRun, tmp_path: Path
) -> None:
    made = Guard.from_run(tiny_source, coverage=0.7, accept_chance=True)
    path = made.save(tmp_path / "guard") / "config.json"
    config = read_json(path, "")
    for count in (0, 5, 1 << 40):
        write_json(path, config | {"training_images": count})
        with pytest.raises(BadInput, match="training"):
            Guard.load(tmp_path / "guard")


def test_recalibration_replaces_no_guard(
    tiny_guard: Guard, folder: Path, tmp_path: Path, command: Command
) -> None:
    old = tiny_guard.save(tmp_path / "guard")
    before = (old / "config.json").read_bytes()
    code, _, error = command(
        "guard", "recalibrate", str(old), "--data", str(folder), "--coverage", "0.5",
        "--accept-chance", "-o", str(old),
    )  # fmt: skip
    assert code == 2
    assert "it is a guard; name a new folder" in error
    assert (old / "config.json").read_bytes() == before


def test_classes_without_an_image_are_named(
    tiny_guard: Guard, folder: Path, tmp_path: Path, command: Command
) -> None:
    old, new = str(tiny_guard.save(tmp_path / "guard")), tmp_path / "guard-2"
    shutil.rmtree(folder / "7")
    code, _, error = command(
        "guard", "recalibrate", old, "--data", str(folder), "--coverage", "0.5",
        "--accept-chance", "-o", str(new),
    )  # fmt: skip
    assert code == 0, error
    assert "lists no training images" in error
    sentence = "no image was of the class 7"
    assert sentence in error
    assert sentence in (new / "README.md").read_text()
    assert sentence in command("guard", "info", str(new))[1]
    assert command("verify", str(new))[0] == 0


def test_a_guard_that_rejects_nothing_says_so(
    tiny_source: LoadedRun, images: tuple[torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    made = demur.guard(tiny_source.net, *images, rejector="RCon", risk=0.9, confidence=0.6)
    assert made.thresholds == (ANY_SCORE,)
    answers = made(images[0][:2])
    assert all(answers.accepted)
    assert answers.reasons[0].endswith("(no threshold)")
    shown = describe(made)
    card = (made.save(tmp_path / "guard", factory="nets:make") / "README.md").read_text()
    for text in (shown["accepts"], shown["guarantee"], card):
        assert "so it rejects nothing" in text
    for text in (*shown.values(), card, *answers.reasons):
        assert "e+38" not in text
