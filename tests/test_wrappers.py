"""What may be wrapped around a training step: averaged weights and adversarially moved ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from demur.attacks import Clean
from demur.bench import check
from demur.engine import FastSteps, PlainSteps, TrainState, Validator
from demur.engine.ema import EMA
from demur.errors import BadInput
from demur.methods import Standard
from demur.recipes import RECIPES, VOCABULARY, Recipe, recipe
from demur.runs import Run
from demur.spec import digest, read, show
from demur.training import Progress, Training, train

CPU = torch.device("cpu")
CHANGES = ["width=4", "precision=fp64", "batch_size=64", "epochs=2", "attack.steps=1"]
BRIEF = ["epochs=3", "width=4", "attack.steps=1", "validation_attack.steps=1"]
BOTH = ["ema=0.9", "awp=0.01"]


def rr(*changes: str) -> Recipe:
    return recipe("digits-pgdat-rr", [*CHANGES, *changes])


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def taken(made: Recipe, steps: PlainSteps, seen: Callable[[], None] = lambda: None) -> TrainState:
    """The learner after all steps, each of which somebody may look at."""
    for epoch in range(made.epochs):
        steps.begin(epoch)
        for i in range(steps.batches):
            steps(i)
            seen()
    return steps.train_state


def plainly(made: Recipe) -> TrainState:
    return taken(made, PlainSteps(made, TrainState(made, CPU), made.data.load()["fit"]))


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# ------------------------------------------------------------------ recipes


def test_both_are_off_unless_asked_for_and_leave_digests_alone() -> None:
    made = RECIPES["digits-pgdat-rr"]
    assert (made.ema, made.awp, made.awp_start) == (0, 0, 0)
    averaged = {name for name, made in RECIPES.items() if made.ema}
    assert averaged == {name for name in RECIPES if name.endswith("-short")} | {"cifar10-best"}
    assert {name for name, made in RECIPES.items() if made.awp} == {"cifar10-best"}
    for change in ("ema=0.995", "awp=0.005"):
        changed = recipe("digits-pgdat-rr", [change])
        assert digest(changed) != digest(made)
        assert read(show(changed), VOCABULARY) == changed
    train_state = TrainState(made, CPU)
    assert train_state.ema is None and train_state.awp is None
    assert train_state.judged is train_state.net
    assert all(name.startswith(("net.", "momentum.")) for name in train_state.tensors())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ema=1", "Recipe.ema must be a number of at least 0 and below 1, not 1"),
        ("ema=-0.1", "Recipe.ema must be a number of at least 0 and below 1"),
        ("awp=-1", "Recipe.awp must be a number of at least 0"),
        ("awp_start=0.5", "there is none; set awp too"),
        ("awp_start=1", "Recipe.awp_start must be a number of at least 0 and below 1"),
    ],
)
def test_nonsense_is_refused_in_words(change: str, words: str) -> None:
    with pytest.raises(BadInput) as error:
        recipe("digits-pgdat-rr", [change])
    assert words in str(error.value)


# ------------------------------------------------------------------ averaged weights


@pytest.mark.parametrize("decay", [0.5, 0.995])
def test_the_average_is_that_of_the_weights_after_each_step(few_digits: None, decay: float) -> None:
    made = rr(f"ema={decay}")
    train_state = TrainState(made, CPU)
    expected, steps = copied(train_state.net.state_dict()), 0

    def follow() -> None:
        nonlocal expected, steps
        keep = min(decay, (1 + steps) / (10 + steps))
        for name, now in train_state.net.state_dict().items():
            floating = now.is_floating_point()
            expected[name] = keep * expected[name] + (1 - keep) * now if floating else now.clone()
        steps += 1

    taken(made, PlainSteps(made, train_state, made.data.load()["fit"]), follow)
    assert train_state.ema is not None
    assert steps == int(train_state.ema.steps) == 10
    found = train_state.ema.net.state_dict()
    assert apart(found, expected) < 1e-12
    assert all(
        found[name].dtype == held.dtype for name, held in train_state.net.state_dict().items()
    )
    assert apart(found, train_state.net.state_dict()) > 1e-3
    assert any("running_var" in name for name in found)


def test_an_average_changes_nothing_of_the_training(few_digits: None) -> None:
    plain, averaged = plainly(rr()).tensors(), plainly(rr("ema=0.9")).tensors()
    assert all(torch.equal(averaged[name], plain[name]) for name in plain)


def test_restored_averages_keep_their_addresses() -> None:
    train_state = TrainState(rr(*BOTH), CPU)
    kept = copied(train_state.tensors())
    places = {name: value.data_ptr() for name, value in train_state.tensors().items()}
    for value in train_state.tensors().values():
        value.add_(1)
    train_state.restore(kept)
    assert all(torch.equal(value, kept[name]) for name, value in train_state.tensors().items())
    assert {name: value.data_ptr() for name, value in train_state.tensors().items()} == places
    assert any(name.startswith("average.") for name in places)
    assert "averaged_steps" in places


def test_the_average_is_what_is_judged(few_digits: None) -> None:
    made = replace(rr("ema=0.9"), validation_attack=Clean())
    train_state, images = plainly(made), made.data.load()["val"]
    assert train_state.ema is not None
    with torch.no_grad():
        for parameter in train_state.net.parameters():
            parameter.zero_()  # the net itself now knows nothing
    x, y = images.batch(slice(None))
    right = train_state.ema.net(x.double()).logits.argmax(1) == y
    assert (
        Validator(train_state, "plain").accuracy(Clean(), images)
        == float(right.double().mean())
        > 0.15
    )
    assert not train_state.ema.net.training


def test_the_average_is_what_a_run_keeps(
    few_digits: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[Training] = []
    go = Training.go

    def noted(self: Training) -> None:
        trainings.append(self)
        go(self)

    monkeypatch.setattr(Training, "go", noted)
    run = train(rr("ema=0.9", "selection=last"), tmp_path / "run")
    (training,) = trainings
    saved, train_state = run.net(CPU).state_dict(), training.train_state
    assert train_state.ema is not None
    average = train_state.ema.net.state_dict()
    assert all(torch.equal(saved[name], average[name].to(saved[name].dtype)) for name in saved)
    agreed = {id(held) for held in train_state.statistics()}
    assert {
        id(held) for net in (train_state.net, train_state.ema.net) for held in net.buffers()
    } == (agreed), "processes agree on both nets' statistics"


# ------------------------------------------------------------------ perturbed weights


def test_a_step_applies_the_gradient_of_the_moved_weights(few_digits: None) -> None:
    """By hand, with autograd alone: images as they are, no momentum yet, weight decay at w."""
    made = replace(rr("awp=0.1"), weight_decay=0.01)
    made = replace(made, method=replace(made.method, framework=Standard()))
    fit, train_state = made.data.load()["fit"], TrainState(made, CPU)
    steps = PlainSteps(made, train_state, fit)
    steps.begin(0)
    before, net = copied(train_state.net.state_dict()), TrainState(made, CPU).net.train()
    x, y = fit.batch(steps.order[:64])
    weights = dict(net.named_parameters())

    def gradients(moved: dict[str, Tensor], held: dict[str, Tensor]) -> tuple[Tensor, ...]:
        buffers = {name: value for name, value in held.items() if name not in weights}

        def called(x: Tensor) -> Any:
            return torch.func.functional_call(net, moved | buffers, x)

        loss = made.method.batch_loss(called, x.double(), x.double(), y)  # type: ignore[arg-type]
        return torch.autograd.grad(loss, list(moved.values()))

    start = {name: before[name].clone().requires_grad_() for name in weights}
    first = gradients(start, copied(before))
    moved = {
        name: (w + (0.1 * w.norm() * g / g.norm() if w.ndim > 1 else 0)).detach().requires_grad_()
        for (name, w), g in zip(start.items(), first, strict=True)
    }
    held = copied(before)  # whose statistics the second pass alone moves
    second = gradients(moved, held)
    steps(0)
    found = train_state.net.state_dict()
    for (name, w), g in zip(start.items(), second, strict=True):
        expected = (w - float(steps.rates[0]) * (g + 0.01 * w)).detach()
        assert float((found[name] - expected).abs().max()) < 1e-12, name
    statistics = [name for name in found if name not in weights]
    assert all(torch.allclose(found[name], held[name], rtol=1e-12) for name in statistics)
    assert any(int(found[name]) == 1 for name in statistics if name.endswith("tracked"))


def test_nothing_moves_before_its_epoch(few_digits: None) -> None:
    """Half of two epochs: the first is that of a training without, to the bit."""
    late, never = rr("awp=0.1", "awp_start=0.5"), rr()
    ends: dict[str, list[dict[str, Tensor]]] = {}
    for name, made in (("late", late), ("never", never)):
        steps = PlainSteps(made, TrainState(made, CPU), made.data.load()["fit"])
        ends[name] = []
        for epoch in range(2):
            steps.begin(epoch)
            for i in range(steps.batches):
                steps(i)
            ends[name].append(copied(steps.train_state.tensors()))
    assert apart(ends["late"][0], ends["never"][0]) == 0
    assert apart(ends["late"][1], ends["never"][1]) > 1e-4


# ------------------------------------------------------------------ engines


@pytest.mark.parametrize(
    ("changes", "compiler"),
    [
        (["bn=batch", *BOTH], "none"),
        (["bn=train", *BOTH, "awp_start=0.5"], "none"),
        (["bn=eval", "ema=0.9"], "none"),
    ],
)
def test_the_fast_engine_wraps_steps_as_the_plain_one_does(
    few_digits: None, monkeypatch: pytest.MonkeyPatch, changes: list[str], compiler: Any
) -> None:
    monkeypatch.setattr(check, "STEPS", 7)
    made = rr(*changes)
    found = check.equality(made, CPU, compiler)
    assert found.holds, found
    fit = made.data.load()["fit"]
    fast = taken(made, FastSteps(made, TrainState(made, CPU, True), fit, compiler)).tensors()
    assert apart(fast, plainly(made).tensors()) < 1e-10, "averages too"


def test_wrappers_never_ask_the_host(few_digits: None) -> None:
    """A recorded step may not read a number from the device."""

    class Listening(TorchDispatchMode):
        heard: set[str] = set()

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.heard.add(str(function))
            return function(*args, **(kwargs or {}))

    train_state = plainly(rr(*BOTH))
    assert train_state.awp is not None and train_state.ema is not None
    with Listening() as mode:  # type: ignore[no-untyped-call]
        with train_state.awp.looking(), train_state.awp.perturb():
            pass
        train_state.ema.follow()
    assert "aten._foreach_norm.Scalar" in mode.heard
    assert not [name for name in mode.heard if "_local_scalar" in name or "nonzero" in name]


def test_a_wrong_average_is_caught(few_digits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    follow, calls = EMA.follow, [0]

    def all_but_the_third(self: EMA) -> None:
        calls[0] += 1
        if calls[0] != 3:
            follow(self)

    monkeypatch.setattr(check, "STEPS", 3)
    monkeypatch.setattr(EMA, "follow", all_but_the_third)
    assert not check.equality(rr(*BOTH), CPU, "none").holds


# ------------------------------------------------------------------ resuming


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained with both, without interruption."""
    made = recipe("digits-pgdat-rr", [*BRIEF, *BOTH])
    return train(made, tmp_path_factory.mktemp("whole") / "run")


def weights(run: Run) -> bytes:
    return (run.path / "model.safetensors").read_bytes()


class Stopped(Exception):
    """A crash."""


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (1, 5), (2, 9)])
def test_interrupted_training_ends_with_the_same_bits(
    whole: Run, tmp_path: Path, epoch: int, step: int
) -> None:
    def crash(seen: Progress) -> None:
        if (seen.epoch, seen.step) == (epoch, step):
            raise Stopped

    with pytest.raises(Stopped):
        train(whole.recipe, tmp_path / "run", watch=crash)
    assert weights(train(whole.recipe, tmp_path / "run")) == weights(whole)
