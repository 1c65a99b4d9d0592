"""The fast step is the plain step, a wrong one is caught, and choices are measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from demur.attacks import PGD
from demur.balls import Linf
from demur.bench import check
from demur.data import Images
from demur.distributed import ProcessGroup
from demur.engine import (
    EnginePlan,
    FastSteps,
    FrozenModel,
    PlainSteps,
    TrainState,
    Validator,
    choose_plan,
    trial,
)
from demur.engine import plan as plan_module
from demur.engine.training_step import TrainingStep
from demur.errors import BadInput
from demur.methods import CCAT, PGDAT, RR, TRADES, Method, Standard
from demur.nets import Small
from demur.precision import Precision
from demur.recipes import Recipe, recipe
from demur.runs import Run
from demur.spec import show
from tests.conftest import FEW

CPU = torch.device("cpu")
SHORT_PGD = PGD(Linf(0.1), steps=2)
CHANGES = ["width=4", "precision=fp64", "batch_size=64", "epochs=2", "attack.steps=2"]


pytestmark = pytest.mark.usefixtures("few_digits")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven steps: one epoch and two steps of the next."""
    monkeypatch.setattr(check, "STEPS", 7)


def rr() -> Recipe:
    return recipe("digits-pgdat-rr", CHANGES)


def short(method: Method) -> Recipe:
    """A recipe of `check` with a small net and two steps an attack."""
    framework = method.framework
    if isinstance(framework, PGDAT):
        framework = replace(framework, attack=SHORT_PGD)
    if isinstance(framework, CCAT | TRADES):
        assert isinstance(framework.attack, PGD)
        framework = replace(framework, attack=replace(framework.attack, steps=2))
    spec = check.recipe_of(replace(method, framework=framework), "fp64")
    return replace(spec, net=Small(4), batch_size=64, epochs=2)


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("method", check.pairs(), ids=show)
def test_fast_steps_end_with_the_plain_steps_weights(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "STEPS", 4)
    found = check.equality(short(method), CPU, "none")
    assert found.holds, found
    assert found.tolerance == 1e-9
    assert not found.captured, "there is no graph on a CPU"


def test_compiled_steps_end_with_the_plain_steps_weights(brief: None) -> None:
    assert check.equality(rr(), CPU, "aot_eager").holds


def never_refreshed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrozenModel, "refresh", lambda self: None)


def eval_mode_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrozenModel, "train", lambda self, mode=True: torch.nn.Module.train(self, False))


def constant_rate(patch: pytest.MonkeyPatch) -> None:
    begin = FastSteps.begin

    def begun(self: FastSteps, epoch: int) -> None:
        begin(self, epoch)
        self.rates = self.rates[:1].expand(len(self.rates))

    patch.setattr(FastSteps, "begin", begun)


def noise_of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    plain = TrainingStep.__call__

    def stuck(self: TrainingStep, chosen: Tensor, step: Any, share: float = 1.0) -> Tensor:
        return plain(self, chosen, 0 * step if isinstance(step, Tensor) else step, share)

    patch.setattr(TrainingStep, "__call__", stuck)


@pytest.mark.parametrize(
    "spoil", [never_refreshed, eval_mode_only, constant_rate, noise_of_the_first_step]
)
def test_a_wrong_engine_is_caught(
    spoil: Callable[[pytest.MonkeyPatch], None], brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    found = check.equality(rr(), CPU, "none")
    assert found.distance_to_plain > 1e-3
    assert not found.holds


def test_a_rounding_is_no_difference_in_fp32(brief: None) -> None:
    """Without an attack there is no sign to turn, so the least allowance is enough."""
    found = check.equality(replace(short(Method(Standard(), RR())), precision="fp32"), CPU, "none")
    assert found.holds
    assert found.tolerance == check.LEAST
    assert 0 < found.distance_to_plain < 1e-4


def test_the_last_partial_batch_takes_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, taken = rr(), list[tuple[str, int, int]]()
    steps = FastSteps(spec, TrainState(spec, CPU), spec.data.load()["fit"], "none")

    def noted(kind: str) -> Callable[..., Tensor]:
        def update(chosen: Tensor, step: Any, share: float) -> Tensor:
            taken.append((kind, int(step), len(chosen)))
            return torch.zeros((), dtype=torch.float64)

        return update

    monkeypatch.setattr(steps, "fast_step", noted("fast"))
    monkeypatch.setattr(steps, "update", noted("plain"))
    steps.begin(1)
    for i in range(steps.batches):
        steps(i)
    assert taken == [*(("fast", 5 + i, 64) for i in range(4)), ("plain", 9, FEW - 4 * 64)]


def as_on_a_gpu(steps: FastSteps) -> None:
    """Let a step be recorded when the epoch begins, as it would be on a GPU."""
    begin = steps.begin

    def begun(epoch: int) -> None:
        begin(epoch)
        if steps.graph is None and not steps.refused:
            steps._try_to_record()

    steps.begin = begun  # type: ignore[method-assign]


def trained(spec: Recipe, steps: PlainSteps) -> dict[str, Tensor]:
    for epoch in range(spec.epochs):
        steps.begin(epoch)
        for i in range(steps.batches):
            steps(i)
    return steps.train_state.tensors()


def test_a_step_that_cannot_be_compiled_falls_back_to_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorder fails after the warm-up has changed weights; they are put back."""
    spec, said = rr(), list[str]()
    fit = spec.data.load()["fit"]
    steps = FastSteps(spec, TrainState(spec, CPU), fit, "none", said.append)

    def failing(work: Callable[[], None], prepare: Callable[[], object]) -> None:
        prepare()
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr("demur.engine.fast.capture", failing)
    as_on_a_gpu(steps)
    fast = trained(spec, steps)
    plain = trained(spec, PlainSteps(spec, TrainState(spec, CPU), fit))
    assert all(torch.equal(fast[name], plain[name]) for name in plain)
    (sentence,) = said
    assert sentence == (
        "the fast step cannot be had here, going on with the plain one: "
        "operation not permitted when stream is capturing"
    )


def test_out_of_memory_is_no_reason_to_go_on_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(work: object, prepare: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("demur.engine.fast.capture", full)
    spec = rr()
    steps = FastSteps(spec, TrainState(spec, CPU), spec.data.load()["fit"], "none")
    as_on_a_gpu(steps)
    with pytest.raises(torch.OutOfMemoryError):
        steps.begin(0)


def test_restored_tensors_keep_their_addresses() -> None:
    train_state = TrainState(rr(), CPU)
    kept = {name: value.clone() for name, value in train_state.tensors().items()}
    places = {name: value.data_ptr() for name, value in train_state.tensors().items()}
    for value in train_state.tensors().values():
        value.add_(1)
    train_state.restore(kept)
    assert all(torch.equal(value, kept[name]) for name, value in train_state.tensors().items())
    assert {name: value.data_ptr() for name, value in train_state.tensors().items()} == places


# ------------------------------------------------------------------ choices


def test_the_judge_counts_right_answers(tiny_run: Run, test_images: Images) -> None:
    train_state = TrainState(tiny_run.recipe, CPU)
    train_state.net.load_state_dict(tiny_run.net(CPU).state_dict())
    found = Validator(train_state, "plain").accuracy(SHORT_PGD, test_images)
    x, y = test_images.batch(slice(None))
    net = tiny_run.net(CPU)
    x_adv = SHORT_PGD.perturb(net, x, y, test_images.index)
    assert found == pytest.approx(
        float((net(x_adv).logits.argmax(1) == y).float().mean()), abs=0.01
    )
    assert train_state.net.training, "the mode is as it was"


@pytest.mark.parametrize("allowed", ["fp64", "fp32", "tf32", "bf16"])
@pytest.mark.parametrize("quickest", [("bf16", True), ("fp32", True), ("fp64", True)])
def test_a_trial_takes_a_measured_gain_and_nothing_the_recipe_forbids(
    allowed: Precision, quickest: tuple[Precision, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "seconds", lambda r, p, last: 0.5 if (p, last) == quickest else 1.0)
    usual = "fp64" if allowed == "fp64" else "fp32"
    found = trial.fastest(replace(rr(), precision=allowed))
    may = quickest[0] == usual or (quickest[0] == "bf16" and allowed == "bf16")
    assert found == (quickest if may else (usual, False))


def test_a_small_gain_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "seconds", lambda r, p, last: 0.95 if last else 1.0)
    assert trial.fastest(rr()) == ("fp64", False)


def test_a_real_trial_measures() -> None:
    assert trial.seconds(replace(rr(), precision="fp32"), "fp32", channels_last=True) > 0
    assert trial.fastest(replace(rr(), precision="fp32"))[0] == "fp32"


def test_plans_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def plan(
        name: str, spec: Recipe, world: ProcessGroup = ProcessGroup(), sync_bn: bool = False
    ) -> EnginePlan:
        return choose_plan(name, spec, CPU, world, sync_bn, said.append)

    spec = replace(rr(), precision="fp32")
    half = replace(spec, precision="bf16")
    monkeypatch.setattr(plan_module, "fastest", lambda spec: ("fp32", True))
    assert plan("auto", spec) == EnginePlan("plain", "fp32")
    assert plan("plain", half) == EnginePlan("plain", "bf16")
    assert plan("fast", spec) == EnginePlan("fast", "fp32", channels_last=True)
    assert not said
    assert plan("auto", half) == EnginePlan("fast", "fp32", channels_last=True)
    assert said == ["bf16 does not pay on this CPU: computing in fp32"]
    assert plan("auto", spec, ProcessGroup(1, 2), sync_bn=True).sync_bn
    assert not plan("auto", spec, ProcessGroup(1, 2)).sync_bn
    train_state = plan("fast", spec).train_state(spec, CPU, ProcessGroup())
    (stem, *_) = train_state.net.trunk.parameters()
    assert stem.is_contiguous(memory_format=torch.channels_last)
    steps = plan("fast", spec).steps(spec, train_state, spec.data.load()["fit"], said.append)
    assert type(steps) is PlainSteps, "there is nothing to record on a CPU"
    with pytest.raises(BadInput, match="no engine is called 'fsat'; did you mean fast"):
        plan("fsat", spec)


def test_roundings_are_tried_while_the_engines_are_further_apart() -> None:
    tried = list[int]()

    def stray(nudge: int) -> float:
        tried.append(nudge)
        return 1e-2 if nudge == 3 else 1e-9

    assert check._allowed(2e-2, stray) == pytest.approx(3e-2)
    assert tried == [0, 1, 2, 3]
    assert check._allowed(1.0, lambda nudge: 1e-9) == check.LEAST
    tried.clear()
    assert check._allowed(0.9 * check.LEAST, stray) == check.LEAST and not tried
