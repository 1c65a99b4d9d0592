"""Nothing at chance level passes: the exact test, and every command that says so."""

import json
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch

from demur import Guard, LoadedRun, Run, guard
from demur.calibrate import ChanceTest
from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import recording
from demur.metrics.intervals import CHANCE_LEVEL
from demur.verification import _chance_problem
from tests.conftest import Command
from tests.own_images import CLASSES, noise_images

WEAK = "not shown to be better than chance (33.3%) and the largest class"
BRIEF = ["size=8", "width=4", "epochs=2", "attack.steps=1", "validation_attack.steps=1",
         "epoch_images=0"]  # fmt: skip


@pytest.mark.parametrize("sizes", [(10, 10), (30, 10), (7, 7, 6), (4, 1, 1, 1), (1, 1)])
def test_the_test_is_the_exact_binomial_one(sizes: tuple[int, ...]) -> None:
    """Against a sum of binomial probabilities, for chance and the largest class by themselves."""
    y, n = np.repeat(np.arange(len(sizes)), sizes), sum(sizes)
    for right in range(n + 1):
        tails = [
            sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(right, n + 1))
            for p in (1 / len(sizes), max(sizes) / n)
        ]
        assert ChanceTest.of(right, y, len(sizes), "test").passed == (max(tails) <= CHANCE_LEVEL)


def test_a_class_alone_never_passes_and_false_alarms_are_rare() -> None:
    assert not ChanceTest.of(50, np.zeros(50, dtype=np.int64), 5, "test").passed
    draw, y = np.random.default_rng(0), np.arange(60) % 5
    guesses = draw.binomial(60, 0.2, 4000)
    passed = np.array([ChanceTest.of(k, y, 5, "test").passed for k in range(61)])
    assert passed[60] and np.mean(passed[guesses]) <= 0.015


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose labels say nothing about them."""
    x, y = noise_images(240, 8)
    path = tmp_path_factory.mktemp("shuffled") / "images.npz"
    np.savez(path, x=x, y=np.random.default_rng(0).permutation(y), classes=np.array(CLASSES))
    return path


def test_a_split_in_the_order_of_classes_is_sampled_evenly(
    tiny_source: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tiny_source.splits["test"]
    order = images.y.argsort(stable=True)
    by_class = Images(images.pixels[order], images.y[order], images.index[order], images.levels)
    monkeypatch.setattr(LoadedRun, "checked_split", lambda self, split: by_class)
    whole = tiny_source.chance_test()
    monkeypatch.setattr(recording, "CHANCE_IMAGES", 100)
    some = tiny_source.chance_test()
    assert (whole.images, some.images) == (len(images), 100)
    assert some.majority <= 15, "the first 100 images are of few classes"
    assert some.passed == whole.passed


def test_shuffled_labels_are_refused_at_export(
    command: Command, shuffled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["images-pgdat-rr-small", f"data={shuffled}", *BRIEF, "--out", "runs/own"]
    code, _, err = command("train", *words)
    assert code == 0 and WEAK in err, err
    for line in ("attack own clean", "calibrate own --coverage 0.3"):
        code, _, err = command(*line.split())
        assert (code, WEAK in err) == (0, True), err
    code, _, err = command("export", "own", "-o", "guard")
    assert code == 2 and WEAK in err and "images-standard-small" in err, err
    assert not Path("guard").exists()
    with pytest.raises(BadInput, match="not shown to be better than chance"):
        Guard.from_run(LoadedRun(Run.open("own"), "cpu"))
    assert len(Run.open("own").records("test")) == 1, "export makes no record"
    code, _, err = command("export", "own", "-o", "guard", "--accept-chance")
    assert code == 0 and WEAK in err, err
    assert f"**{Guard.load('guard').summary.partition('. It')[0]}**" in card("guard")
    config = json.loads(Path("guard/config.json").read_text())
    stored = config["calibration"]["chance_test"]
    assert (stored["split"], stored["images"], stored["classes"]) == ("test", 36, 3)
    assert command("verify", "guard")[0] == 0
    assert _chance_problem({}) == _chance_problem({"chance_test": stored}) == ""
    for change in ({"right": 36}, {"passed": True}, {"images": "36"}, {"classes": 0}):
        assert "sentence about chance" in _chance_problem({"chance_test": stored | change})


def card(folder: str) -> str:
    return (Path(folder) / "README.md").read_text()


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (1.0, "100.0% of 200 calibration images are right, above"),
        (0.0, "50.0% of 200 calibration images are right, not shown"),
    ],
)
def test_a_guard_of_any_model_states_its_accuracy_beside_chance(gain: float, said: str) -> None:
    y = torch.arange(200) % 2
    x = torch.rand(200, 1, 4, 4) / 2 + y[:, None, None, None] / 2
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    net.load_state_dict({
        "1.weight": gain * torch.stack([-torch.ones(16), torch.ones(16)]),
        "1.bias": torch.tensor([16 * gain, -0.1]),
    })  # fmt: skip
    if gain == 0:
        with pytest.raises(BadInput, match=r"not shown to be better than chance .*; accept_chance"):
            guard(net, x, y, coverage=0.5)
    made = guard(net, x, y, coverage=0.5, accept_chance=True)
    assert made.summary.startswith(said.replace("X", "calibration images are right"))
