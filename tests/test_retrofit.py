"""Learning A alone on a net that is trained already."""

from pathlib import Path

import pytest
import torch

from demur.data import Images
from demur.errors import BadInput
from demur.recipes import recipe
from demur.runs import Run
from demur.train import train

BRIEF = ["epochs=2", "width=4", "attack.steps=1", "judge.steps=1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(recipe("digits-pgdat", BRIEF), tmp_path_factory.mktemp("base") / "run")


def test_only_the_head_learns(base: Run, tmp_path: Path, test_images: Images) -> None:
    run = train(recipe("digits-pgdat-rr", [*BRIEF, f"base={base.path}"]), tmp_path / "run")
    before, after = (each.net(torch.device("cpu")) for each in (base, run))
    fresh = run.recipe.net.build(run.recipe.data.domain, run.recipe.method.head)
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
    moved = [
        not torch.equal(value, after.state_dict()[f"aux.{name}"])
        for name, value in fresh.aux.state_dict().items()
    ]
    assert all(moved)
    x, _ = test_images.batch(slice(0, 50))
    with torch.no_grad():
        assert torch.equal(before(x).logits, after(x).logits)
        assert after(x).aux.shape == (50, 1)
    assert run.chosen["base_weights"] == base.chosen["weights"]


def test_a_retrofit_resumes_with_the_same_bits(base: Run, tmp_path: Path) -> None:
    made = recipe("digits-pgdat-rr", [*BRIEF, f"base={base.path}", "average=0.9"])
    whole = train(made, tmp_path / "whole")

    class Stopped(Exception):
        pass

    def watch(seen: object) -> None:
        if getattr(seen, "epoch", 0) == 1 and getattr(seen, "step", 0) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        train(made, tmp_path / "run", watch=watch)
    run = train(made, tmp_path / "run")
    files = [(each.path / "model.safetensors").read_bytes() for each in (run, whole)]
    assert files[0] == files[1]


def test_bases_that_do_not_fit_are_refused(base: Run, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="only the head learns, and this one has no weights"):
        recipe("digits-pgdat", [f"base={base.path}"])
    other = recipe("digits-pgdat-rr", ["width=8", f"base={base.path}"])
    with pytest.raises(BadInput, match="a base must be a Small"):
        train(other, tmp_path / "run")
    missing = recipe("digits-pgdat-rr", [f"base={tmp_path / 'nothing'}"])
    with pytest.raises(BadInput, match="nothing"):
        train(missing, tmp_path / "run")
    assert not (tmp_path / "run").exists()
