"""Guards as folders: what is written is read back, and nothing else is trusted."""

import copy
import json
import os
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import demur
from demur import (
    GDA,
    GMM,
    KD,
    KNN,
    LID,
    BadInput,
    Con,
    Coupled,
    GDAStar,
    Guard,
    LoadedRun,
    PerClass,
    RCon,
    ViM,
)
from demur.files.checked_files import read_json, write_json
from demur.guards.bundle import CONFIG, WEIGHTS
from demur.rejectors import Rejector
from tests.conftest import Command

FITTED: list[Rejector] = [
    KD(0.01, 20), LID(5, 100), KNN(5, 100), GDA(), GDAStar(), GMM(log_det=True), ViM(),
    PerClass(Con()), Coupled(gate=KNN(5, 100), gate_threshold=-1.0, score=RCon()),
]  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tiny_guard: Guard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_guard.save(tmp_path_factory.mktemp("bundle") / "guard")


@pytest.fixture
def own_bundle(bundle: Path, tmp_path: Path) -> Path:
    return Path(copytree(bundle, tmp_path / "guard"))


def test_a_loaded_guard_decides_as_the_saved_one(tiny_guard: Guard, bundle: Path) -> None:
    loaded = Guard.load(bundle)
    x = torch.rand(20, *tiny_guard.shape)
    before, after = tiny_guard(x), loaded(x)
    assert np.array_equal(before.scores, after.scores)
    assert before.reasons == after.reasons
    assert loaded.class_names == tiny_guard.class_names
    assert loaded.calibration == json.loads(json.dumps(tiny_guard.calibration))
    assert loaded.built_from == tiny_guard.built_from
    assert loaded.eps == tiny_guard.eps
    assert sorted(path.name for path in bundle.iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("rejector", FITTED, ids=lambda r: type(r).__name__)
def test_fitted_scores_are_restored(
    rejector: Rejector, tiny_source: LoadedRun, tmp_path: Path
) -> None:
    x, y = tiny_source.splits["cal"].batch(slice(None))
    x_fit, y_fit = tiny_source.splits["fit"].batch(slice(0, 400))
    made = tiny_source.run.recipe
    saved = demur.guard(
        tiny_source.net, x, y, rejector=rejector, x_fit=x_fit, y_fit=y_fit,
        built_from=(made.net, made.method.head),
    )  # fmt: skip
    loaded = Guard.load(saved.save(tmp_path / "guard"))
    assert np.array_equal(loaded(x).scores, saved(x).scores)
    assert loaded.thresholds == saved.thresholds


def test_the_card_has_front_matter_figures_and_the_policy(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    folder = Guard.from_run(scored_source, coverage=0.7, resize=True).save(tmp_path / "guard")
    text = (folder / "README.md").read_text()
    start, matter, body = text.split("---\n", 2)
    assert start == ""
    assert "library_name: demur\npipeline_tag: image-classification" in matter
    assert "| test, pgd-3 (aimed at no rejector) |" in body
    assert "**resized**" in body
    assert "at least 70% of the images accepted with 95% confidence" in body
    assert "It says nothing about attacked images" in body


def test_a_card_without_a_guarantee_says_so(tiny_source: LoadedRun, tmp_path: Path) -> None:
    x, y = tiny_source.splits["cal"].batch(slice(0, 20))
    saved = demur.guard(tiny_source.net, x, y)
    text = (saved.save(tmp_path / "guard") / "README.md").read_text()
    assert "**The thresholds have no guarantee**" in text
    assert "Nothing is known about adversarial examples" in text


# ---------------------------------------------------------------------------------- damage


def change(folder: Path, path: str, value: Any) -> None:
    """Change a value of the configuration, and its digest with it."""
    config = read_json(folder / CONFIG, "")
    *outer, last = path.split(".")
    holder: Any = config
    for key in outer:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    holder[last] = value
    write_json(folder / CONFIG, config)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_changed_byte_is_noticed(own_bundle: Path, name: str) -> None:
    path = own_bundle / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is damaged"):
        Guard.load(own_bundle)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.net", "ResNet8(width=100000)", "above 1024"),
        ("model.net", "WideResNet(depth=304, widen=1000)", "does not fit|cannot be built"),
        ("model.net", "WideResNet(depth=4000000000)", "above 1024|needs a depth"),
        ("model.net", "Digits()", "specs of a net"),
        ("model.net", "__import__('os').system('true')", "is neither a value"),
        ("model.net", 'Custom("os:system")', "is code and is not imported for a file"),
        ("model.head", "Con()", "specs of a net"),
        ("image.height", 10**9, "from 1 to 2048"),
        ("image.height", -8, "from 1 to 2048"),
        ("image.channels", 3, "for 3 channels"),
        ("image.std", [0.0], "above 0"),
        ("class_names", ["a", "b"], "does not fit"),
        ("class_names", ["a"] * 10, "different words"),
        ("temperature", 0, "temperature must be"),
        ("scores", [], "scores must hold"),
        ("scores.0.rejector", "KD()", "has the arrays centre, bank, labels, log_counts"),
        ("scores.0.rejector", "ResNet8()", "is not a rejector"),
        ("scores.0.threshold", "high", "scores.0.threshold must be"),
        ("scores.0.arrays", {"bank": ["float32", 10**9, 10**9]}, "is not an array"),
        ("scores.0.arrays", {"bank": ["object", 1]}, "is not an array"),
        ("scores.0.arrays", {"bank": ["float32", 3]}, "no digest of scores.safetensors"),
        ("calibration.score_counts", [1], "histogram"),
        ("calibration.coverage", {"value": "all"}, "calibration.coverage"),
        ("calibration.risk", 1, "calibration.risk must be"),
        ("figures", [{"attack": "clean"}], "figures.0.images"),
        ("files", {}, "no digest of model.safetensors"),
        ("format", "other", "format must be"),
        ("format_version", 2, "format_version must be"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_sentence(
    own_bundle: Path, path: str, value: Any, message: str
) -> None:
    change(own_bundle, path, value)
    with pytest.raises(BadInput, match=message) as caught:
        Guard.load(own_bundle)
    assert str(own_bundle) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_guard_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        Guard.load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"config.json is missing"):
        Guard.load(tmp_path)
    (tmp_path / "recipe.txt").touch()
    with pytest.raises(BadInput, match="is a run; make a guard with demur export"):
        Guard.load(tmp_path)


# ---------------------------------------------------------------------------------- foreign nets


class Foreign(nn.Module):
    """A net that demur did not build."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.tied = self.linear.bias  # shares memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x.flatten(1))
        return logits


@pytest.fixture
def foreign(tiny_source: LoadedRun) -> Guard:
    torch.manual_seed(0)
    x, y = tiny_source.splits["cal"].batch(slice(None))
    return demur.guard(Foreign(), x, y, mean=[0.3], std=[0.4], accept_chance=True)


def test_a_foreign_net_comes_back_by_its_factory_or_is_given(
    foreign: Guard, tmp_path: Path
) -> None:
    x = torch.rand(5, 1, 8, 8)
    by_factory = foreign.save(tmp_path / "a", factory=f"{__name__}:Foreign")
    assert np.array_equal(Guard.load(by_factory)(x).scores, foreign(x).scores)
    assert "DEMUR_MODULES" in (by_factory / "README.md").read_text()
    bare = foreign.save(tmp_path / "b")
    with pytest.raises(BadInput, match=r"give it as Guard.load\(folder, model=...\)"):
        Guard.load(bare)
    assert np.array_equal(Guard.load(bare, model=Foreign())(x).scores, foreign(x).scores)
    with pytest.raises(BadInput, match="does not fit"):
        Guard.load(bare, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def test_no_code_of_a_bundle_is_imported(
    foreign: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "came_with_it.py").write_text("raise SystemExit('code was run')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = foreign.save(tmp_path / "guard", factory="came_with_it:make")
    with pytest.raises(BadInput, match="allow it with DEMUR_MODULES=came_with_it"):
        Guard.load(folder)
    (tmp_path / "allowed_one.py").write_text(
        f"def make():\n    import {__name__} as m\n    return m.Foreign()\n"
    )
    folder = foreign.save(tmp_path / "guard", factory="allowed_one:make")
    monkeypatch.setenv("DEMUR_MODULES", "allowed_one")
    assert Guard.load(folder).shape == (1, 8, 8)
    sys.modules.pop("allowed_one")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("os:abort", "allow it with DEMUR_MODULES=os"),
        ("demur.files.checked_files:delete_temporary_files", "allow it with DEMUR_MODULES=demur"),
        ("os:path.nothing", "cannot be imported"),
        ("pathlib:Path", "allow it with DEMUR_MODULES=pathlib"),
        ("torch.nn:Linear", "failed: "),
        ("allowed_module:returns_none", "does not return a module"),
        ("allowed_module:fails", "failed: .on purpose"),
        ("__main__:make", "move it to a module of its own"),
        ("a b:make", "write module:name"),
        ("make", "write module:name"),
    ],
)
def test_a_factory_that_makes_no_module_is_one_sentence(
    foreign: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, message: str
) -> None:
    (tmp_path / "allowed_module.py").write_text(
        "def returns_none(): pass\ndef fails(): raise KeyError('on purpose')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DEMUR_MODULES", "allowed_module")
    folder = foreign.save(tmp_path / "guard")
    change(folder, "model.factory", factory)
    with pytest.raises(BadInput, match=message):
        Guard.load(folder)


def test_a_factory_for_a_net_that_normalises_by_itself(tiny_guard: Guard, tmp_path: Path) -> None:
    """The normalisation must not be applied twice."""
    folder = tiny_guard.save(tmp_path / "guard", factory=f"{__name__}:Foreign")
    config = read_json(folder / CONFIG, "")
    assert config["image"]["mean"] is None
    loaded = Guard.load(folder, model=copy.deepcopy(tiny_guard.model))  # type: ignore[arg-type]
    x = torch.rand(3, *tiny_guard.shape)
    assert np.allclose(loaded(x).scores, tiny_guard(x).scores, atol=1e-6)


def test_saving_replaces_a_guard_and_nothing_else(
    tiny_guard: Guard, own_bundle: Path, tmp_path: Path
) -> None:
    tiny_guard.save(own_bundle)
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(BadInput, match="holds other files"):
        tiny_guard.save(other)
    (other / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="name a new folder"):
        tiny_guard.save(other)
    assert (other / "thesis.tex").exists()
    from dataclasses import replace

    with pytest.raises(BadInput, match="only a torch module"):
        replace(tiny_guard, model=lambda x: x).save(tmp_path / "function")
    assert not (tmp_path / "function").exists()


# ---------------------------------------------------------------------------------- commands


def test_export_and_predict(scored_source: LoadedRun, command: Command, tmp_path: Path) -> None:
    from PIL import Image

    run = str(scored_source.run.path)
    code, _, err = command("export", run, "--coverage", "0.7", "-o", "guard", "--device", "cpu")
    assert code == 0, err
    assert "at least 70% of the images accepted" in err
    again = ("export", run, "--coverage", "0.6", "-o", "guard", "--device", "cpu")
    code, _, err = command(*again)
    assert code == 2
    assert "guard holds a guard; name a new folder, or give --replace" in err
    assert Guard.load("guard").calibration["guarantee"] == "Coverage(0.7)"
    assert command(*again, "--replace")[0] == 0
    pictures = tmp_path / "pictures"
    (pictures / "below").mkdir(parents=True)
    images = scored_source.splits["test"].pixels[:3, 0].numpy()
    for number, pixels in enumerate(images):
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(pictures / f"{number}.png")
    (pictures / "below" / os.fsdecode(b"b\xffd.jpg")).write_bytes(b"nothing")
    (pictures / "notes.txt").write_text("no image")
    code, out, err = command("predict", "guard", str(pictures), f"{pictures}/*.png")
    assert code == 0, err
    header, *rows = out.splitlines()
    assert header == "file,class,label,accepted,confidence,R-Con,reason,error,guard"
    assert len(rows) == 4
    assert "/below/b\ufffdd.jpg," in rows[-1]
    reason = "is damaged or not an image; give one of PNG, JPEG, WEBP, BMP, GIF, TIFF, PPM"
    assert f'{reason}",guard 1 (' in rows[-1].replace(scored_source.run.name, "guard")
    assert "of 3 predictions accepted" in err
    code, out, _ = command("predict", "guard", str(pictures / "0.png"), "--json")
    assert json.loads(out)[0]["reason"].split(":")[0] in ("accepted", "rejected")
    code, out, err = command("predict", "guard", str(pictures / "below"), "-o", "all.csv")
    assert code == 2
    assert "no image could be read" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "nowhere", "x.png"), "there is no folder nowhere"),
        (("predict", "GUARD", "nothing/*.png"), "nothing/*.png names no image"),
        (("export", "nowhere"), "there is no run 'nowhere'"),
        (("export", "RUN", "--tpr", "2"), "give a share between 0 and 1"),
        (("export", "RUN", "--tpr", "0.9", "--risk", "0.1"), "give one of tpr, coverage and risk"),
        (("export", "RUN", "-o", "."), "holds other files"),
        (("serve", "nowhere"), "there is no folder nowhere"),
        (("serve", "GUARD", "--max-images", "0"), "max_images must be"),
        (("serve", "GUARD", "--timeout", "nan"), "give a finite number"),
        (("serve", "GUARD", "--max-body", "inf"), "give a finite number"),
        (("serve", "GUARD", "--max-queue", "3"), "raise it to 64"),
        (("serve", "GUARD", "--token", ""), "the token is empty"),
        (("serve", "GUARD", "--host", "256.1.1.1"), "cannot be used"),
    ],
)
def test_wrong_commands_are_one_sentence(
    scored_source: LoadedRun, bundle: Path, command: Command, words: tuple[str, ...], message: str
) -> None:
    Path("other.txt").write_text("")
    names = {"RUN": str(scored_source.run.path), "GUARD": str(bundle)}
    code, _, err = command(*(names.get(word, word) for word in words))
    assert code == 2, err
    assert message in err
    assert len(err.strip().splitlines()) == 1
