"""Fast training steps end with the weights of plain steps, for every framework and head."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_check
from demur.attacks import PGD
from demur.attacks.balls import Linf
from demur.data import Digits, Images, Splits
from demur.engine import FrozenModel
from demur.methods import CCAT, PGDAT, RR, TRADES, Method
from demur.numerics import Precision
from demur.recipes import Recipe, recipe
from demur.spec import show
from demur.training import FastSteps, PlainSteps, TrainState, train
from tests.gpu.test_graphs import exhaust_memory_while_capturing

STEPS = 6
FEW = 300  # images: four whole batches of 64 and a part of one
# after six steps one flipped pixel weighs more than after the twenty of engine_check
MIN_TOLERANCE = 5e-3


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images and few steps."""
    load = Digits.load

    def few(self: Digits, folder: Path | None = None) -> Splits:
        return {name: part.first(min(FEW, len(part))) for name, part in load(self, folder).items()}

    monkeypatch.setattr(Digits, "load", few)
    monkeypatch.setattr(engine_check, "STEPS", STEPS)
    monkeypatch.setattr(engine_check, "MIN_TOLERANCE", MIN_TOLERANCE)


def short(method: Method, precision: Precision) -> Recipe:
    """A recipe of `engine_check` with attacks of three steps."""
    framework = method.framework
    if isinstance(framework, PGDAT):
        framework = replace(framework, attack=PGD(Linf(0.1), steps=3, step_size=0.05))
    if isinstance(framework, CCAT | TRADES):
        assert isinstance(framework.attack, PGD)
        framework = replace(framework, attack=replace(framework.attack, steps=3))
    spec = engine_check.recipe_of(replace(method, framework=framework), precision)
    return replace(spec, batch_size=64, epochs=2)


@pytest.mark.parametrize("method", engine_check.pairs(), ids=show)
def test_fast_steps_equal_plain_steps_in_fp32(device: torch.device, method: Method) -> None:
    found = engine_check.equality(short(method, "fp32"), device, "none")
    assert found.captured, found.failure
    assert found.holds, found


@pytest.mark.parametrize("bn", ["train", "batch", "eval"])
def test_fast_steps_equal_plain_steps_in_fp64(device: torch.device, bn: Any) -> None:
    """In fp64 nothing flips: the captured step agrees to rounding, here with EMA and AWP."""
    spec = short(Method(PGDAT(bn=bn), RR()), "fp64")
    found = engine_check.equality(replace(spec, ema=0.99, awp=0.01), device, "none")
    assert found.captured, found.failure
    assert found.holds, found
    assert found.tolerance == engine_check.FP64_TOLERANCE


def test_a_step_that_skips_the_refresh_is_detected(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenModel, "refresh", lambda self: None)
    assert not engine_check.equality(short(Method(PGDAT(), RR()), "fp64"), device, "none").holds


def test_out_of_memory_during_the_capture_falls_back_to_the_plain_step(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh = FrozenModel.refresh

    def greedy_refresh(self: FrozenModel) -> None:
        refresh(self)
        exhaust_memory_while_capturing(device)

    monkeypatch.setattr(FrozenModel, "refresh", greedy_refresh)
    spec, messages = short(Method(PGDAT(), RR()), "fp64"), list[str]()
    fit = spec.data.load()["fit"].to(device)
    states = [TrainState(spec, device) for _ in range(2)]
    fast = FastSteps(spec, states[0], fit, "none", messages.append)
    for steps in (fast, PlainSteps(spec, states[1], fit)):
        for epoch in range(2):
            steps.begin(epoch)
            for i in range(steps.batches):
                steps(i)
    (message,) = messages
    assert message.startswith("cannot capture the fast training step, using the plain one: ")
    assert "out of memory" in message
    ours, plain = (state.tensors() for state in states)
    assert engine_check.distance(ours, plain) < 1e-9 * engine_check.distance(
        plain, initial_tensors(spec, device)
    )


def initial_tensors(spec: Recipe, device: torch.device) -> dict[str, torch.Tensor]:
    return TrainState(spec, device).tensors()


@pytest.mark.parametrize("bn", ["train", "eval"])
def test_losses_of_a_resnet18_in_bf16_are_those_of_the_plain_step(
    device: torch.device, bn: str
) -> None:
    """CIFAR-shaped random images at full width."""
    spec = recipe("cifar10-pgdat-rr", [f"bn={bn}", "attack.steps=2"])
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3 * 128, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (3 * 128,), generator=g)
    fit = Images(pixels, y, torch.arange(3 * 128), 255).to(device)
    fast_state, plain_state = TrainState(spec, device, True), TrainState(spec, device, True)
    fast = FastSteps(spec, fast_state, fit, "none", pytest.fail)
    plain = PlainSteps(spec, plain_state, fit)
    for steps in (fast, plain):
        steps.begin(0)
        for i in range(3):
            steps(i)
    assert fast.graph is not None
    assert torch.allclose(fast.losses, plain.losses, rtol=0.05)
    assert float((fast.losses[0] - plain.losses[0]).abs()) < 0.02 * float(plain.losses[0])


def test_a_compiled_run_has_the_losses_and_accuracies_of_a_plain_run(
    device: torch.device, tmp_path: Path
) -> None:
    """The whole `train` with torch.compile, CUDA graphs and validation by a FrozenModel."""
    spec = recipe("digits-pgdat-rr", ["epochs=2", "attack.steps=3", "validation_attack.steps=3"])
    messages: list[str] = []
    lines = {}
    for engine in ("fast", "plain"):
        run = train(spec, tmp_path / engine, device, engine=engine, on_message=messages.append)
        text = (run.path / "metrics.jsonl").read_text()
        lines[engine] = [json.loads(line) for line in text.splitlines()]
    assert messages == []
    for fast, plain in zip(lines["fast"], lines["plain"], strict=True):
        assert fast["loss"] == pytest.approx(plain["loss"], rel=0.02)
        assert fast["val_clean"] == pytest.approx(plain["val_clean"], abs=0.1)
        assert fast["val_robust"] == pytest.approx(plain["val_robust"], abs=0.1)
