"""Fast steps end with the plain steps' weights, wrong engines are detected, plans are measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine_check
from demur.attacks import PGD
from demur.attacks.balls import Linf
from demur.data import Images
from demur.engine import EnginePlan, FrozenModel, choose_plan, plan
from demur.errors import BadInput
from demur.methods import CCAT, PGDAT, RR, TRADES, Method, Standard
from demur.nets import ResNet8
from demur.numerics import Precision
from demur.progress import ignore
from demur.recipes import Recipe, recipe
from demur.runs import Run
from demur.spec import show
from demur.training import FastSteps, PlainSteps, Training, TrainState, Validator
from demur.training.step import TrainingStep
from tests.conftest import FEW
from tests.one_block import OneBlock

CPU = torch.device("cpu")
SHORT_PGD = PGD(Linf(0.1), steps=2)
CHANGES = ["width=4", "precision=fp64", "batch_size=64", "epochs=2", "attack.steps=1"]


pytestmark = pytest.mark.usefixtures("few_digits")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare five steps: one epoch and two steps of the next."""
    monkeypatch.setattr(engine_check, "STEPS", 5)


def rr(*changes: str) -> Recipe:
    return recipe("digits-pgdat-rr", [*CHANGES, *changes])


def short(method: Method) -> Recipe:
    """A recipe of `engine_check` with a small net and an attack of two steps."""
    framework = method.framework
    if isinstance(framework, PGDAT):
        framework = replace(framework, attack=SHORT_PGD)
    if isinstance(framework, CCAT | TRADES):
        assert isinstance(framework.attack, PGD)
        framework = replace(framework, attack=replace(framework.attack, steps=2))
    spec = engine_check.recipe_of(replace(method, framework=framework), "fp64")
    return replace(spec, net=ResNet8(4), batch_size=64, epochs=2)


# ------------------------------------------------------------------ steps


def few_pairs() -> list[Method]:
    """Every framework with RR and every head with PGD-AT; the tests on a GPU compare all pairs."""
    pgdat = engine_check.frameworks()[-3]
    assert isinstance(pgdat, PGDAT) and pgdat.bn == "train"
    return [m for m in engine_check.pairs() if m.head == RR() or m.framework == pgdat]


@pytest.mark.parametrize("method", few_pairs(), ids=show)
def test_fast_steps_end_with_the_plain_steps_weights(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_check, "STEPS", 2)
    found = engine_check.equality(replace(short(method), batch_size=16), CPU, "none")
    assert found.holds, found
    assert found.tolerance == 1e-9
    assert not found.captured, "there is no graph on a CPU"


@pytest.mark.exhaustive  # test_frozen_model.py compiles a gradient
def test_compiled_steps_end_with_the_plain_steps_weights() -> None:
    spec = replace(rr("attack.steps=2", "batch_size=110"), net=OneBlock())
    fit, initial = spec.data.load()["fit"], TrainState(spec, CPU).tensors()
    compiled = FastSteps(spec, TrainState(spec, CPU, channels_last=True), fit, "aot_eager")
    fast = train_all_epochs(spec, compiled)
    plain = train_all_epochs(spec, PlainSteps(spec, TrainState(spec, CPU), fit))
    moved = engine_check.distance(plain, initial)
    assert engine_check.distance(plain, fast) <= engine_check.FP64_TOLERANCE * moved
    assert moved > 0.1


def skip_refresh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrozenModel, "refresh", lambda self: None)


def stay_in_eval_mode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrozenModel, "train", lambda self, mode=True: torch.nn.Module.train(self, False))


def use_a_constant_learning_rate(patch: pytest.MonkeyPatch) -> None:
    begin = FastSteps.begin

    def begin_with_one_rate(self: FastSteps, epoch: int) -> None:
        begin(self, epoch)
        self.rates = self.rates[:1].expand(len(self.rates))

    patch.setattr(FastSteps, "begin", begin_with_one_rate)


def reuse_the_noise_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    plain = TrainingStep.__call__

    def without_step(self: TrainingStep, chosen: Tensor, step: Any, share: float = 1.0) -> Tensor:
        return plain(self, chosen, 0 * step if isinstance(step, Tensor) else step, share)

    patch.setattr(TrainingStep, "__call__", without_step)


@pytest.mark.parametrize(
    "break_engine",
    [
        skip_refresh,
        stay_in_eval_mode,
        use_a_constant_learning_rate,
        reuse_the_noise_of_the_first_step,
    ],
)
def test_a_wrong_engine_is_detected(
    break_engine: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_check, "STEPS", 3)
    break_engine(monkeypatch)
    found = engine_check.equality(rr("batch_size=16"), CPU, "none")
    assert found.distance_to_plain > 1e-3
    assert not found.holds


def test_rounding_in_fp32_stays_within_the_smallest_tolerance(brief: None) -> None:
    """Without an attack no gradient sign can flip."""
    found = engine_check.equality(
        replace(short(Method(Standard(), RR())), precision="fp32"), CPU, "none"
    )
    assert found.holds
    assert found.tolerance == engine_check.MIN_TOLERANCE
    assert 0 < found.distance_to_plain < 1e-4


def test_the_last_partial_batch_takes_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, taken = rr(), list[tuple[str, int, int]]()
    steps = FastSteps(spec, TrainState(spec, CPU), spec.data.load()["fit"], "none")

    def log_step(kind: str) -> Callable[..., Tensor]:
        def run_step(chosen: Tensor, step: Any, share: float) -> Tensor:
            taken.append((kind, int(step), len(chosen)))
            return torch.zeros((), dtype=torch.float64)

        return run_step

    monkeypatch.setattr(steps, "fast_step", log_step("fast"))
    monkeypatch.setattr(steps, "plain_step", log_step("plain"))
    steps.begin(1)
    for i in range(steps.batches):
        steps(i)
    assert taken == [*(("fast", 3 + i, 64) for i in range(2)), ("plain", 5, FEW - 2 * 64)]


def capture_as_on_a_gpu(steps: FastSteps) -> None:
    """Make `begin` capture the step, as on a GPU."""
    begin = steps.begin

    def begin_and_capture(epoch: int) -> None:
        begin(epoch)
        if steps.graph is None and not steps.capture_failed:
            steps._try_capture()

    steps.begin = begin_and_capture  # type: ignore[method-assign]


def train_all_epochs(spec: Recipe, steps: PlainSteps) -> dict[str, Tensor]:
    for epoch in range(spec.epochs):
        steps.begin(epoch)
        for i in range(steps.batches):
            steps(i)
    return steps.train_state.tensors()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nand more"),
            "operation not permitted when stream is capturing",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
    ],
    ids=["uncapturable", "memory"],
)
def test_a_failed_capture_falls_back_to_the_plain_step(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture fails after the warm-up has changed weights; they are restored."""
    spec, messages = rr("batch_size=75"), list[str]()
    fit = spec.data.load()["fit"]
    steps = FastSteps(spec, TrainState(spec, CPU), fit, "none", messages.append)

    def failing(work: Callable[[], None], prepare: Callable[[], object]) -> None:
        prepare()
        work()
        raise error

    monkeypatch.setattr("demur.training.step.capture", failing)
    capture_as_on_a_gpu(steps)
    fast = train_all_epochs(spec, steps)
    plain = train_all_epochs(spec, PlainSteps(spec, TrainState(spec, CPU), fit))
    assert all(torch.equal(fast[name], plain[name]) for name in plain)
    (message,) = messages
    assert message == f"cannot capture the fast training step, using the plain one: {reason}"


def test_restored_tensors_keep_their_addresses() -> None:
    train_state = TrainState(rr(), CPU)
    saved = {name: value.clone() for name, value in train_state.tensors().items()}
    addresses = {name: value.data_ptr() for name, value in train_state.tensors().items()}
    for value in train_state.tensors().values():
        value.add_(1)
    train_state.restore(saved)
    assert all(torch.equal(value, saved[name]) for name, value in train_state.tensors().items())
    assert {name: value.data_ptr() for name, value in train_state.tensors().items()} == addresses


# ------------------------------------------------------------------ validation and plans


def test_validator_returns_the_accuracy_under_the_attack(
    tiny_run: Run, test_images: Images
) -> None:
    train_state = TrainState(tiny_run.recipe, CPU)
    train_state.net.load_state_dict(tiny_run.net(CPU).state_dict())
    found = Validator(train_state, "plain").accuracy(SHORT_PGD, test_images)
    x, y = test_images.batch(slice(None))
    net = tiny_run.net(CPU)
    x_adv = SHORT_PGD.perturb(net, x, y, test_images.index)
    assert found == pytest.approx(
        float((net(x_adv).logits.argmax(1) == y).float().mean()), abs=0.01
    )
    assert train_state.net.training, "the mode is restored"


@pytest.mark.parametrize("allowed", ["fp64", "fp32", "tf32", "bf16"])
@pytest.mark.parametrize("fastest", [("bf16", True), ("fp32", True), ("fp64", True)])
def test_trial_chooses_the_fastest_settings_that_the_recipe_allows(
    allowed: Precision, fastest: tuple[Precision, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(recipe: Recipe, precision: Precision, channels_last: bool) -> float:
        return 0.5 if (precision, channels_last) == fastest else 1.0

    monkeypatch.setattr(plan, "gradient_seconds", seconds)
    plain = "fp64" if allowed == "fp64" else "fp32"
    found = plan.fastest_settings(replace(rr(), precision=allowed))
    is_allowed = fastest[0] == plain or (fastest[0] == "bf16" and allowed == "bf16")
    assert found == (fastest if is_allowed else (plain, False))


def test_trial_keeps_the_plain_settings_for_a_small_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gradient_seconds", lambda r, p, last: 0.95 if last else 1.0)
    assert plan.fastest_settings(rr()) == ("fp64", False)


def test_trial_measures_a_real_net() -> None:
    spec = replace(rr(), precision="fp32")
    assert plan.gradient_seconds(spec, "fp32", channels_last=True) > 0
    assert plan.fastest_settings(spec)[0] == "fp32"


def test_plans_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []

    def chosen(name: str, spec: Recipe) -> EnginePlan:
        return choose_plan(name, spec, CPU, messages.append)

    spec = replace(rr(), precision="fp32")
    bf16 = replace(spec, precision="bf16")
    monkeypatch.setattr(plan, "fastest_settings", lambda spec: ("fp32", True))
    assert chosen("auto", spec) == EnginePlan("plain", "fp32")
    assert chosen("plain", bf16) == EnginePlan("plain", "bf16")
    assert chosen("fast", spec) == EnginePlan("fast", "fp32", channels_last=True)
    assert not messages
    assert chosen("auto", bf16) == EnginePlan("fast", "fp32", channels_last=True)
    assert messages == ["bf16 is not faster on this CPU; computing in fp32"]
    with pytest.raises(BadInput, match="no engine is called 'fsat'; did you mean fast"):
        chosen("fsat", spec)


def test_a_fast_plan_on_a_cpu_takes_plain_steps_in_its_memory_format(tmp_path: Path) -> None:
    fast, spec = EnginePlan("fast", "fp32", channels_last=True), replace(rr(), precision="fp32")
    training = Training(spec, Run(tmp_path), spec.data.load(), CPU, fast, ignore, ignore)
    assert type(training.steps) is PlainSteps, "there is nothing to capture on a CPU"
    (stem, *_) = training.train_state.net.trunk.parameters()
    assert stem.is_contiguous(memory_format=torch.channels_last)


def test_more_roundings_are_tried_until_the_tolerance_covers_the_distance() -> None:
    tried = list[int]()

    def stray(nudge: int) -> float:
        tried.append(nudge)
        return 1e-2 if nudge == 3 else 1e-9

    assert engine_check._allowed(2e-2, stray) == pytest.approx(3e-2)
    assert tried == [0, 1, 2, 3]
    assert engine_check._allowed(1.0, lambda nudge: 1e-9) == engine_check.MIN_TOLERANCE
    tried.clear()
    assert (
        engine_check._allowed(0.9 * engine_check.MIN_TOLERANCE, stray) == engine_check.MIN_TOLERANCE
        and not tried
    )
