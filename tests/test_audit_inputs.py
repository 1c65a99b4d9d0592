"""Inputs of an audit: folders of images; evaluations in parts that are killed and resumed."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from demur.attacks import APGD, Square
from demur.attacks.autoattack import Chain
from demur.attacks.balls import Linf
from demur.audits import ensemble_state, image_parts
from demur.audits.ensemble_result import EnsembleResult
from demur.audits.ensembles import EnsembleEvaluation
from demur.audits.image_parts import audit_images
from demur.audits.model_loading import load_model
from demur.data import CIFAR10
from demur.errors import BadInput
from demur.methods import RR
from demur.nets import ResNet18
from demur.output import as_output
from tests.own_images import write_folder

BALL = Linf(0.02)


class TestFolders:
    def test_labels_follow_the_names_of_the_classes(self, tmp_path: Path) -> None:
        (x, y), cal = audit_images(str(write_folder(tmp_path, count=9, side=6)), None)
        assert cal is None
        assert (x.shape, x.dtype) == ((9, 3, 6, 8), np.uint8)
        assert y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # cat, dog, fish
        assert (x.mean((2, 3)).argmax(1) == y).all()

    def test_some_images_come_from_all_classes_and_are_resized(self, tmp_path: Path) -> None:
        (x, y), _ = audit_images(str(write_folder(tmp_path, count=9, side=6)), 3, size=4)
        assert x.shape == (3, 3, 4, 4)
        assert y.tolist() == [0, 1, 2]

    def test_an_empty_class_folder_renumbers_no_class(self, tmp_path: Path) -> None:
        """The finding: later classes got the numbers of earlier ones, and the best grade."""
        folder = write_folder(tmp_path, count=9, side=6)
        (folder / "aaa").mkdir()
        with pytest.raises(BadInput, match="the folder 'aaa' has no image"):
            audit_images(str(folder), None)

    def test_folders_of_splits(self, tmp_path: Path) -> None:
        for name, count in (("train", 3), ("cal", 6), ("test", 9)):
            write_folder(tmp_path / name, count=count, side=6)
        (x, _), cal = audit_images(str(tmp_path), None)
        assert cal is not None
        assert (len(x), len(cal[0])) == (9, 6)

    def test_what_cannot_be_read_is_said(self, tmp_path: Path) -> None:
        folder = str(write_folder(tmp_path, count=3, side=6))
        with pytest.raises(BadInput, match="--size is 0"):
            audit_images(folder, None, 0)
        with pytest.raises(BadInput, match="leave it out"):
            audit_images("digits", None, 8)
        Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "small.png")
        with pytest.raises(BadInput, match="from 4 x 4 to 6 x 8 pixels; give --size"):
            audit_images(folder, None)
        (tmp_path / "only").mkdir()
        write_folder(tmp_path / "only" / "train", count=3, side=6)
        with pytest.raises(BadInput, match="has no folder test"):
            audit_images(str(tmp_path / "only"), None)


def evaluated(
    folder: Path, name: str, on_query: Callable[[], None] = lambda: None
) -> EnsembleResult:
    """Evaluate a net on 20 images of a file in four parts."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).eval()
    x = np.load(folder / "x.npy", mmap_mode="r")
    y = net(torch.tensor(np.array(x))).argmax(1).numpy()
    net.register_forward_hook(lambda *given: on_query())
    chain = Chain((APGD(BALL, steps=5), Square(BALL, queries=40)))
    evaluation = EnsembleEvaluation(net, chain, ["apgd", "square"], False, None, "plain")
    state, x_adv = folder / name, folder / f"{name}.npy"
    return evaluation.evaluate(x, y, bs=3, state_path=state, sanity=False, x_adv_path=x_adv)


def test_parts_that_are_killed_resume_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_parts, "PART_BYTES", 4 * 48 * 6)  # six images
    monkeypatch.setattr(ensemble_state, "WRITE_SECONDS", 0.0)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((20, 3, 4, 4), np.float32))

    def die_in_the_third_part() -> None:
        if (tmp_path / "state.2").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    arguments = (tmp_path, "state", die_in_the_third_part)
    child = multiprocessing.get_context("fork").Process(target=evaluated, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert {path.name for path in tmp_path.glob("state*")} >= {"state", "state.1", "state.2"}
    assert not (tmp_path / "state.3").exists()
    assert not (tmp_path / "state.npy").exists()
    resumed, whole = (evaluated(tmp_path, name) for name in ("state", "other"))
    assert resumed.broken_by == whole.broken_by
    assert "" in whole.broken_by
    assert {"apgd", "square"} & {*whole.broken_by}
    assert torch.equal(resumed.x_adv, whole.x_adv)


def test_an_official_checkpoint_of_data_parallel_loads(tmp_path: Path) -> None:
    """Names as in the Rectified-Rejection repository, behind module. and in a container."""
    net = ResNet18(width=4).build(CIFAR10().domain, RR(), seed=3).eval()
    names = (
        (r"^trunk\.stages\.(\d)\.(\d+)\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}."),
        (r"^trunk\.stem\.", "conv1."), (r"^trunk\.norm\.", "bn."), (r"^classify\.", "linear."),
        (r"^aux\.layers\.", "dense."), (r"\.norm([12])\.", r".bn\1."),
        (r"\.shortcut\.", ".shortcut.0."),
    )  # fmt: skip
    theirs = {}
    for name, tensor in net.state_dict().items():
        if not name.startswith("normalise"):
            for pattern, official in names:
                name = re.sub(pattern, official, name)  # noqa: PLW2901
            theirs[f"module.{name}"] = tensor
    assert {"module.conv1.weight", "module.layer2.0.shortcut.0.weight"} <= set(theirs)
    torch.save({"epoch": 7, "state_dict": theirs}, tmp_path / "model_best.pth")
    loaded, x = (
        load_model("rectified-rejection", tmp_path / "model_best.pth"),
        torch.rand(2, 3, 32, 32),
    )
    found, expected = as_output(loaded(x)), net(x)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.aux, expected.aux)
