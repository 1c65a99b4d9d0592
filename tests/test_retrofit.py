"""Recipes with a base: only the head is trained, on a frozen classifier."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demur.data import CIFAR10, Images
from demur.errors import BadInput
from demur.recipes import recipe
from demur.runs import Run
from demur.training import base_of, train

BRIEF = ["epochs=2", "width=4", "attack.steps=1", "validation_attack.steps=1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(recipe("digits-pgdat", BRIEF), tmp_path_factory.mktemp("base") / "run")


def test_only_the_head_is_trained(base: Run, tmp_path: Path, test_images: Images) -> None:
    run = train(recipe("digits-pgdat-rr", [*BRIEF, f"base={base.path}"]), tmp_path / "run")
    before, after = (trained.net(torch.device("cpu")) for trained in (base, run))
    initial = run.recipe.net.build(run.recipe.data.domain, run.recipe.method.head)
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
    changed = [
        not torch.equal(value, after.state_dict()[f"aux.{name}"])
        for name, value in initial.aux.state_dict().items()
    ]
    assert all(changed)
    x, _ = test_images.batch(slice(0, 50))
    with torch.no_grad():
        assert torch.equal(before(x).logits, after(x).logits)
        assert after(x).aux.shape == (50, 1)
    assert run.checkpoint["base_weights"] == base.checkpoint["weights"]
    assert run.checkpoint["epoch"] == 2, (
        "every epoch has the same accuracy, so the last one is selected"
    )


def test_an_interrupted_run_with_a_base_resumes_with_the_same_bits(
    base: Run, tmp_path: Path
) -> None:
    made = recipe("digits-pgdat-rr", [*BRIEF, f"base={base.path}", "ema=0.9"])
    uninterrupted = train(made, tmp_path / "whole")

    class StopTraining(Exception):
        pass

    def on_progress(progress: object) -> None:
        if getattr(progress, "epoch", 0) == 1 and getattr(progress, "step", 0) == 2:
            raise StopTraining

    with pytest.raises(StopTraining):
        train(made, tmp_path / "run", on_progress=on_progress)
    aside = base.path.with_name("aside")
    base.path.rename(aside)
    train(recipe("digits-pgdat", [*BRIEF, "seed=1"]), base.path)  # another run in its place
    with pytest.raises(BadInput, match="is not the run that run began with"):
        train(made, tmp_path / "run")
    shutil.rmtree(base.path)
    aside.rename(base.path)
    run = train(made, tmp_path / "run")
    files = [(trained.path / "model.safetensors").read_bytes() for trained in (run, uninterrupted)]
    assert files[0] == files[1]


def test_bad_bases_raise(base: Run, tmp_path: Path) -> None:
    for name, change in (("digits-pgdat", "seed=0"), ("digits-pgdat-rr", "construction=con")):
        with pytest.raises(BadInput, match="trains the head alone, and this head has no weights"):
            recipe(name, [change, f"base={base.path}"])
    with pytest.raises(BadInput, match="the same accuracy in every epoch"):
        recipe("digits-pgdat-rr", [f"base={base.path}", "selection=val"])
    other = recipe("digits-pgdat-rr", ["width=8", f"base={base.path}"])
    with pytest.raises(BadInput, match="a base must be a ResNet8"):
        train(other, tmp_path / "run")
    elsewhere = recipe("digits-pgdat-rr", [*BRIEF, f"base={base.path}"])
    with pytest.raises(BadInput, match="has seen no held-out image"):
        base_of(replace(elsewhere, data=CIFAR10()))
    missing = recipe("digits-pgdat-rr", [f"base={tmp_path / 'nothing'}"])
    with pytest.raises(BadInput, match="nothing"):
        train(missing, tmp_path / "run")
    assert not (tmp_path / "run").exists()
