"""Training steps with an average of the weights (EMA) and adversarial weight perturbation (AWP)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import engine_check
from demur.attacks import Clean
from demur.data import Digits, Splits
from demur.errors import BadInput
from demur.methods import Standard
from demur.recipes import RECIPES, VOCABULARY, Recipe, recipe
from demur.runs import Run
from demur.spec import digest, read, show
from demur.training import FastSteps, PlainSteps, Progress, Training, TrainState, Validator, train
from demur.training.state import EMA

CPU = torch.device("cpu")
CHANGES = ["width=4", "precision=fp64", "batch_size=22", "epochs=2", "attack.steps=1"]
BRIEF = ["epochs=2", "width=4", "batch_size=22", "attack.steps=1", "validation_attack.steps=1"]
BOTH = ["ema=0.9", "awp=0.01"]


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole batches and a part of one."""
    load = Digits.load

    def few(self: Digits, folder: Path | None = None) -> Splits:
        return {name: images.first(60) for name, images in load(self, folder).items()}

    monkeypatch.setattr(Digits, "load", few)


def rr(*changes: str) -> Recipe:
    return recipe("digits-pgdat-rr", [*CHANGES, *changes])


def clone_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def train_all_epochs(
    spec: Recipe, steps: PlainSteps, after_step: Callable[[], None] = lambda: None
) -> TrainState:
    """Take all steps, each followed by `after_step`; return the train state."""
    for epoch in range(spec.epochs):
        steps.begin(epoch)
        for i in range(steps.batches):
            steps(i)
            after_step()
    return steps.train_state


def train_plain(spec: Recipe) -> TrainState:
    return train_all_epochs(spec, PlainSteps(spec, TrainState(spec, CPU), spec.data.load()["fit"]))


def max_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# ------------------------------------------------------------------ recipes


def test_ema_and_awp_are_off_by_default_and_part_of_the_digest() -> None:
    spec = RECIPES["digits-pgdat-rr"]
    assert (spec.ema, spec.awp, spec.awp_start) == (0, 0, 0)
    with_ema = {name for name, recipe in RECIPES.items() if recipe.ema}
    perturbed = {"cifar10-best", "cifar10-trades-rr-awp"}
    averaged = {name for name in RECIPES if name.endswith(("-short", "-small"))}
    assert with_ema == averaged | perturbed
    assert {name for name, recipe in RECIPES.items() if recipe.awp} == perturbed
    for change in ("ema=0.995", "awp=0.005"):
        changed = recipe("digits-pgdat-rr", [change])
        assert digest(changed) != digest(spec)
        assert read(show(changed), VOCABULARY) == changed
    train_state = TrainState(spec, CPU)
    assert train_state.ema is None and train_state.awp is None
    assert train_state.eval_net is train_state.net
    assert all(name.startswith(("net.", "momentum.")) for name in train_state.tensors())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ema=1", "Recipe.ema must be a number of at least 0 and below 1, not 1"),
        ("ema=-0.1", "Recipe.ema must be a number of at least 0 and below 1"),
        ("awp=-1", "Recipe.awp must be a number of at least 0"),
        ("awp_start=0.5", "awp_start has no effect without awp; set awp too"),
        ("awp_start=1", "Recipe.awp_start must be a number of at least 0 and below 1"),
    ],
)
def test_invalid_values_raise_a_message(change: str, message: str) -> None:
    with pytest.raises(BadInput) as error:
        recipe("digits-pgdat-rr", [change])
    assert message in str(error.value)


# ------------------------------------------------------------------ EMA


def test_ema_is_the_average_of_the_weights_after_each_step(few_digits: None) -> None:
    """Three steps before and three after the warm-up of the decay ends."""
    decay = 0.3
    spec = rr(f"ema={decay}")
    train_state = TrainState(spec, CPU)
    expected, steps = clone_all(train_state.net.state_dict()), 0

    def update_expected() -> None:
        nonlocal expected, steps
        weight = min(decay, (1 + steps) / (10 + steps))
        for name, now in train_state.net.state_dict().items():
            floating = now.is_floating_point()
            average = weight * expected[name] + (1 - weight) * now
            expected[name] = average if floating else now.clone()
        steps += 1

    train_all_epochs(spec, PlainSteps(spec, train_state, spec.data.load()["fit"]), update_expected)
    assert train_state.ema is not None
    assert steps == int(train_state.ema.steps) == 6
    found = train_state.ema.net.state_dict()
    assert max_difference(found, expected) < 1e-12
    weights = train_state.net.state_dict()
    assert all(found[name].dtype == weights[name].dtype for name in weights)
    assert max_difference(found, weights) > 1e-3
    assert any("running_var" in name for name in found)


def test_ema_does_not_change_the_trained_weights(few_digits: None) -> None:
    plain, averaged = train_plain(rr()).tensors(), train_plain(rr("ema=0.9")).tensors()
    assert all(torch.equal(averaged[name], plain[name]) for name in plain)


def test_restored_ema_tensors_keep_their_addresses() -> None:
    train_state = TrainState(rr(*BOTH), CPU)
    saved = clone_all(train_state.tensors())
    addresses = {name: value.data_ptr() for name, value in train_state.tensors().items()}
    for value in train_state.tensors().values():
        value.add_(1)
    train_state.restore(saved)
    assert all(torch.equal(value, saved[name]) for name, value in train_state.tensors().items())
    assert {name: value.data_ptr() for name, value in train_state.tensors().items()} == addresses
    assert any(name.startswith("average.") for name in addresses)
    assert "averaged_steps" in addresses


def test_validation_uses_the_ema(few_digits: None) -> None:
    spec = replace(rr("ema=0.9"), validation_attack=Clean())
    train_state, images = train_plain(spec), spec.data.load()["val"]
    assert train_state.ema is not None
    with torch.no_grad():
        for parameter in train_state.net.parameters():
            parameter.zero_()  # only the average is still trained
    x, y = images.batch(slice(None))
    correct = train_state.ema.net(x.double()).logits.argmax(1) == y
    accuracy = Validator(train_state, "plain").accuracy(Clean(), images)
    assert accuracy == float(correct.double().mean()) > 0.15
    assert not train_state.ema.net.training


def test_a_run_saves_the_ema(
    few_digits: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[Training] = []
    train_run = Training.train

    def log_and_train(self: Training) -> None:
        trainings.append(self)
        train_run(self)

    monkeypatch.setattr(Training, "train", log_and_train)
    run = train(rr("ema=0.9", "selection=last"), tmp_path / "run")
    (training,) = trainings
    saved, train_state = run.net(CPU).state_dict(), training.train_state
    assert train_state.ema is not None
    average = train_state.ema.net.state_dict()
    assert all(torch.equal(saved[name], average[name].to(saved[name].dtype)) for name in saved)
    nets = (train_state.net, train_state.ema.net)
    buffers = {id(buffer) for net in nets for buffer in net.buffers()}
    assert {id(buffer) for buffer in train_state.buffers()} == buffers, "of both nets"


# ------------------------------------------------------------------ AWP


def test_an_awp_step_applies_the_gradient_at_the_perturbed_weights(few_digits: None) -> None:
    """Computed by autograd alone: clean images, first step, weight decay at the original w."""
    spec = replace(rr("awp=0.1"), weight_decay=0.01)
    spec = replace(spec, method=replace(spec.method, framework=Standard()))
    fit, train_state = spec.data.load()["fit"], TrainState(spec, CPU)
    steps = PlainSteps(spec, train_state, fit)
    steps.begin(0)
    before, net = clone_all(train_state.net.state_dict()), TrainState(spec, CPU).net.train()
    x, y = fit.batch(steps.order[: spec.batch_size])
    weights = dict(net.named_parameters())

    def gradients(moved: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, ...]:
        buffers = {name: value for name, value in state.items() if name not in weights}

        def forward(x: Tensor) -> Any:
            return torch.func.functional_call(net, moved | buffers, x)

        loss = spec.method.batch_loss(forward, x.double(), x.double(), y)  # type: ignore[arg-type]
        return torch.autograd.grad(loss, list(moved.values()))

    start = {name: before[name].clone().requires_grad_() for name in weights}
    first = gradients(start, clone_all(before))
    moved = {
        name: (w + (0.1 * w.norm() * g / g.norm() if w.ndim > 1 else 0)).detach().requires_grad_()
        for (name, w), g in zip(start.items(), first, strict=True)
    }
    state = clone_all(before)  # only the second pass updates the running statistics
    second = gradients(moved, state)
    steps(0)
    found = train_state.net.state_dict()
    for (name, w), g in zip(start.items(), second, strict=True):
        expected = (w - float(steps.rates[0]) * (g + 0.01 * w)).detach()
        assert float((found[name] - expected).abs().max()) < 1e-12, name
    statistics = [name for name in found if name not in weights]
    assert all(torch.allclose(found[name], state[name], rtol=1e-12) for name in statistics)
    assert any(int(found[name]) == 1 for name in statistics if name.endswith("tracked"))


def test_awp_starts_at_its_epoch(few_digits: None) -> None:
    """With awp_start=0.5 the first of two epochs is bit-identical to one without AWP."""
    late, never = rr("awp=0.1", "awp_start=0.5"), rr()
    ends: dict[str, list[dict[str, Tensor]]] = {}
    for name, spec in (("late", late), ("never", never)):
        steps = PlainSteps(spec, TrainState(spec, CPU), spec.data.load()["fit"])
        ends[name] = []
        for epoch in range(2):
            steps.begin(epoch)
            for i in range(steps.batches):
                steps(i)
            ends[name].append(clone_all(steps.train_state.tensors()))
    assert max_difference(ends["late"][0], ends["never"][0]) == 0
    assert max_difference(ends["late"][1], ends["never"][1]) > 1e-4


# ------------------------------------------------------------------ engines


@pytest.mark.parametrize(
    "changes", [["bn=batch", *BOTH], ["bn=train", *BOTH, "awp_start=0.5"], ["bn=eval", "ema=0.9"]]
)
def test_fast_steps_with_ema_and_awp_end_with_the_plain_steps_weights(
    few_digits: None, changes: list[str]
) -> None:
    spec = rr(*changes)
    fit = spec.data.load()["fit"]
    fast = train_all_epochs(
        spec, FastSteps(spec, TrainState(spec, CPU, True), fit, "none")
    ).tensors()
    assert max_difference(fast, train_plain(spec).tensors()) < 1e-10, "EMA included"


def test_ema_and_awp_never_synchronise_with_the_host(few_digits: None) -> None:
    """A captured step may not read a number from the device."""

    class OperatorLog(TorchDispatchMode):
        operators: set[str] = set()

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.operators.add(str(function))
            return function(*args, **(kwargs or {}))

    train_state = train_plain(rr(*BOTH))
    assert train_state.awp is not None and train_state.ema is not None
    with OperatorLog() as log:  # type: ignore[no-untyped-call]
        with train_state.awp.statistics_backup.preserve(), train_state.awp.perturb():
            pass
        train_state.ema.update()
    assert "aten._foreach_norm.Scalar" in log.operators
    assert not [name for name in log.operators if "_local_scalar" in name or "nonzero" in name]


def test_a_skipped_ema_update_is_detected(
    few_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = EMA.update, [0]

    def update_except_the_third(self: EMA) -> None:
        calls[0] += 1
        if calls[0] != 3:
            update(self)

    monkeypatch.setattr(engine_check, "STEPS", 3)
    monkeypatch.setattr(EMA, "update", update_except_the_third)
    assert not engine_check.equality(rr(*BOTH), CPU, "none").holds


# ------------------------------------------------------------------ resuming


def weights(run: Run) -> bytes:
    return (run.path / "model.safetensors").read_bytes()


class Crash(Exception):
    """Raised in the middle of a training."""


def test_an_interrupted_training_ends_with_bit_identical_weights(
    few_digits: None, tmp_path: Path
) -> None:
    def crash(progress: Progress) -> None:
        if (progress.epoch, progress.step) == (1, 2):
            raise Crash

    spec = recipe("digits-pgdat-rr", [*BRIEF, *BOTH])
    with pytest.raises(Crash):
        train(spec, tmp_path / "run", on_progress=crash)
    resumed = train(spec, tmp_path / "run")
    assert weights(resumed) == weights(train(spec, tmp_path / "uninterrupted"))
