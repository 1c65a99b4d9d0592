"""Nets of the zoo: weights with 8 bits, and opening a net by its name."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

import demur
from demur.errors import BadInput
from demur.files.checked_files import SCALE, restore
from demur.runs import Run
from demur.runs.run import zoo_folder, zoo_names
from tests.conftest import Command

quantise = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "zoo.py"))["quantise"]
LARGEST_ZOO = 36_000_000  # bytes


def test_large_tensors_are_restored_within_half_a_step_of_their_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 100, 3, 3, generator=generator)
    weight *= torch.logspace(-6, 3, 64).view(-1, 1, 1, 1)
    weight[5] = 0
    state = {"w": weight, "bias": torch.randn(64, generator=generator), "n": torch.tensor(7)}
    small = quantise(state)
    assert {name: one.dtype for name, one in small.items()} == {
        "w": torch.int8, "w" + SCALE: torch.float32, "bias": torch.float16, "n": torch.int64,
    }  # fmt: skip
    back = restore(small)
    assert set(back) == set(state)
    step = weight.flatten(1).abs().amax(1) / 127
    error = (back["w"] - weight).flatten(1).abs().amax(1)
    assert (error <= 0.5001 * step).all()
    assert torch.equal(back["w"][5], weight[5])


def test_quantising_again_changes_nothing() -> None:
    weight = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    once = restore(quantise({"w": weight}))
    assert torch.allclose(restore(quantise(once))["w"], once["w"], rtol=1e-6, atol=0)


def test_scales_of_another_shape_are_not_used() -> None:
    small = quantise({"w": torch.ones(64, 1000)}) | {"w" + SCALE: torch.ones(63)}
    assert restore(small)["w"].dtype == torch.int8  # read_tensors then refuses the kind of numbers


def test_every_net_of_the_zoo_opens_and_all_fit_into_the_limit() -> None:
    names = zoo_names()
    assert "cifar10-best" in names
    assert sum(one.stat().st_size for one in zoo_folder().rglob("*")) <= LARGEST_ZOO
    for name in names:
        run = Run.open(name)
        net, domain = run.net(torch.device("cpu")), run.recipe.data.domain
        assert net(torch.full((1, *domain.shape), 0.5)).logits.shape == (1, domain.classes)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(BadInput, match="no run 'cifar10-bets'; did you mean cifar10-best"):
        Run.open("cifar10-bets")
    with pytest.raises(BadInput, match="'cifar10-bets' is no model; write a run"):
        demur.load_model("cifar10-bets")


def test_a_run_of_the_same_name_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Run.open("cifar10-best").path == zoo_folder() / "cifar10-best"
    shutil.copytree(zoo_folder() / "cifar10-best", tmp_path / "runs" / "cifar10-best")
    assert Run.open("cifar10-best").path == Path("runs/cifar10-best")
    monkeypatch.setenv("DEMUR_ZOO", str(tmp_path / "empty"))
    assert zoo_names() == []


def test_a_damaged_net_is_to_be_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(zoo_folder() / "digits-pgdat-small", tmp_path / "digits-pgdat-small")
    monkeypatch.setenv("DEMUR_ZOO", str(tmp_path))
    weights = tmp_path / "digits-pgdat-small" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BadInput, match=r"is damaged: .*; it came with demur; fetch another copy"):
        demur.load_model("digits-pgdat-small")


def test_models_are_listed_and_loaded_by_name(command: Command) -> None:
    code, out, _ = command("list", "models")
    assert code == 0
    assert re.match(r"cifar10-best +finished", out)
    model = demur.load_model("cifar10-best")
    assert isinstance(model, torch.nn.Module)
    assert not model.training
    with pytest.raises(BadInput, match="is no model for a checkpoint"):
        demur.load_model("cifar10-best", checkpoint="weights.pt")


def test_an_audit_of_a_net_takes_its_data_set(command: Command) -> None:
    code, _, err = command("audit", "my_code:net", "--n", "5")
    assert code == 2
    assert "say which images to attack: --data" in err
    code, _, err = command("audit", "cifar10-best", "--n", "0")
    assert code == 2
    assert "--n is 0" in err, "the data set is that of the recipe"
