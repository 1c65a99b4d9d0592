"""Recipes for a few hundred images: eps that grows, several passes an epoch, which epoch counts."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from demur.attacks import PGD, Clean
from demur.attacks.balls import L2, Linf
from demur.data import Images, OwnImages
from demur.errors import BadInput
from demur.methods import PGDAT, Standard
from demur.recipes import RECIPES, Recipe, attack, recipe
from demur.spec import digest, show
from demur.training import FastSteps, PlainSteps, TrainState, check_trainable, train
from demur.training.step import MEASURED, MEASURED_IMAGES, expectations
from tests.conftest import Command
from tests.own_images import write_folder

BRIEF = ["size=8", "width=4", "epochs=4", "epoch_images=72", "attack.steps=1",
         "validation_attack.steps=1"]  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small(photos: Path, *changes: str) -> Recipe:
    made = recipe("images-pgdat-rr-small", [f"data={photos}", *BRIEF, *changes])
    return replace(made, data=made.data.prepared())


def test_eps_is_zero_then_grows_to_its_full_value() -> None:
    made = replace(RECIPES["images-pgdat-rr-small"], epochs=10, eps_ramp=(0.2, 0.6))
    strengths = [made.strength(epoch) for epoch in range(10)]
    assert strengths == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    assert replace(made, eps_ramp=(0.0, 0.0)).strength(0) == 1
    assert [replace(made, eps_ramp=(1.0, 1.0)).strength(k) for k in (8, 9)] == [0, 1]
    with pytest.raises(BadInput, match="eps_ramp ends before it begins"):
        replace(made, eps_ramp=(0.6, 0.2))


def test_each_step_attacks_with_the_eps_of_its_epoch(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small(photos, "eps_ramp=(0.25, 0.75)")
    steps = PlainSteps(made, TrainState(made, CPU), made.data.load()["fit"].to(CPU))
    seen: list[float] = []
    perturb = PGD.perturb

    def counted(self: PGD, *inputs: object) -> object:
        x_adv = perturb(self, *inputs)  # type: ignore[arg-type]
        assert (x_adv - inputs[1]).abs().max() <= self.ball.eps + 1e-6  # type: ignore[operator]
        seen.append(self.ball.eps * 255)
        return x_adv

    monkeypatch.setattr(PGD, "perturb", counted)
    for epoch in range(4):
        steps.begin(epoch)
        steps(0)
    assert seen == pytest.approx([1, 2, 2]), "the first epoch attacks no image"


def test_an_epoch_takes_few_images_several_times(photos: Path) -> None:
    made = small(photos, "batch_size=16")
    fit = made.data.load()["fit"].to(CPU)
    assert (len(fit), made.passes(len(fit)), made.passes(5000)) == (36, 2, 1)
    steps = PlainSteps(made, TrainState(made, CPU), fit)
    assert steps.batches == 5
    orders = []
    for epoch in (0, 1):
        steps.begin(epoch)
        assert steps.order.bincount().tolist() == [2] * 36
        orders += [steps.order[:36].tolist(), steps.order[36:].tolist()]
    assert len({tuple(order) for order in orders}) == 4, "no order comes twice"
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(36))}
    with pytest.raises(BadInput, match="batch norm needs two"):  # 72 = 71 + 1
        check_trainable(small(photos, "batch_size=71"), made.data.load())


def test_fast_steps_follow_the_growing_eps(photos: Path) -> None:
    made = small(photos, "precision=fp64", "eps_ramp=(0.25, 0.75)", "batch_size=32", "ema=0")
    fit, weights = made.data.load()["fit"].to(CPU), []
    for make in (PlainSteps, partial(FastSteps, compiler="none")):
        state = TrainState(made, CPU)
        steps = make(made, state, fit)
        for epoch in (0, 1, 3):  # without an attack, at half of eps, at eps
            steps.begin(epoch)
            for i in (0, steps.batches - 1):  # a whole batch and a part of one
                steps(i)
        weights.append(torch.cat([p.detach().flatten() for p in state.net.parameters()]))
    assert torch.allclose(weights[0], weights[1], atol=1e-10)


def test_old_recipes_keep_their_digest_and_new_fields_are_stored() -> None:
    made = RECIPES["digits-pgdat-rr"]
    assert digest(replace(made, eps_ramp=(0.0, 0.0), epoch_images=0)) == digest(made)
    text = show(RECIPES["images-pgdat-rr-small"])
    assert "eps_ramp=(0.2, 0.5)" in text and "OwnImages(eps=2/255)" in text
    assert OwnImages().threat.linf == 8 / 255, "as runs from before have it"


def test_eps_sets_training_validation_and_named_attacks(photos: Path) -> None:
    for changes in (["eps=4/255", f"data={photos}"], [f"data={photos}", "eps=4/255"]):
        made = recipe("images-pgdat-rr-small", changes)
        framework = made.method.framework
        assert isinstance(framework, PGDAT) and isinstance(framework.attack, PGD)
        assert isinstance(made.validation_attack, PGD)
        balls = framework.attack.ball, made.validation_attack.ball
        assert balls == (Linf(4 / 255), Linf(4 / 255))
        assert framework.attack.step_size == pytest.approx(2 / 255)
        named = attack("pgd-20", made)
        assert isinstance(named, PGD) and named.ball == Linf(4 / 255)
        assert attack("autoattack-l2", made).ball == L2(64 / 255)  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="eps must be a number above 0"):
        recipe("images-pgdat-rr-small", ["eps=0"])
    with pytest.raises(BadInput, match="could mean"):
        recipe("digits-pgdat-rr", ["eps=0.1"])


def test_the_plain_recipes_select_by_clean_accuracy(photos: Path, tmp_path: Path) -> None:
    for name in ("images-standard", "images-standard-small"):
        assert isinstance(RECIPES[name].method.framework, Standard)
        assert RECIPES[name].validation_attack == Clean()
    made = recipe(
        "images-standard-small",
        [f"data={photos}", "size=8", "width=4", "epochs=3", "epoch_images=0"],
    )
    run = train(made, tmp_path / "run")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert run.checkpoint["value"] == max(line["val_clean"] for line in lines)
    assert run.checkpoint["reason"] == "largest val accuracy on clean images"


def test_only_epochs_with_the_full_eps_are_selected(photos: Path, tmp_path: Path) -> None:
    run = train(small(photos, "eps_ramp=(0.5, 1.0)"), tmp_path / "run")
    assert run.checkpoint["epoch"] == 4


def test_what_to_expect_is_measured_and_said_before_and_after(
    command: Command, photos: Path
) -> None:
    fit = small(photos).data.load()["fit"]
    few = Images(fit.pixels, fit.y, fit.index, fit.levels)
    accuracy, minutes = expectations(small(photos), few, CPU)
    assert accuracy.startswith("on 36 training images no accuracy is known; 305 gave clean and")
    pixels, y, index = (torch.cat([part] * 6) for part in (few.pixels, few.y, few.index))
    more = Images(pixels, y, index, few.levels)
    assert next(expectations(small(photos), more, CPU)).startswith("on 216 training images expect")
    for name, (clean, attacked) in MEASURED.items():
        assert f"{clean:.0f}% and {attacked:.0f}% ({name})" in accuracy
        recipe(*name.split(maxsplit=1))  # it can be typed
    assert f"measured on {MEASURED_IMAGES} photographs of five classes, chance 20%" in accuracy
    assert re.fullmatch(r"training takes about \d+ min on this machine", minutes)
    words = ["images-pgdat-rr-small", f"data={photos}", *BRIEF, "--out", "runs/own"]
    code, _, err = command("train", *words, "--device", "cpu")
    assert code == 0, err
    assert err.index(accuracy) < err.index("is stored")
    assert re.search(
        r"epoch \d of 4 is stored: clean [\d.]+%, attacked [\d.]+% of 6 val images, chance 33.3%",
        err,
    ), err
