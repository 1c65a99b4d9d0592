"""More than a hundred odd models: a right result or one sentence, and everything left as found."""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur.attacks import APGD, Square
from demur.attacks.autoattack import Chain
from demur.attacks.balls import Linf
from demur.audits.ensembles import EnsembleEvaluation
from demur.engine import any_module
from demur.errors import BadInput
from demur.output import as_output
from tests.hundred_models import CLASSES, RANDOM, RIGHT, SENTENCE

BALL, COUNT = Linf(0.1), 4
CHAIN = Chain((APGD(BALL, steps=2), Square(BALL, queries=3)))


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_module, "TRIAL_ROUNDS", 2)
        yield


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that torch calls old
        torch.manual_seed(0)
        return make()


def images() -> Tensor:
    return torch.rand(COUNT, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def hooks(module: nn.Module) -> list[int]:
    found = [value for name, value in vars(module).items() if "hook" in name]
    return [len(value) for value in found if isinstance(value, dict)]


@torch.no_grad()
def predicted(model: Any, x: Tensor) -> Tensor:
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    dtype = next((t.dtype for t in parameters if t.is_floating_point()), x.dtype)
    return as_output(model(x.to(dtype, copy=True))).logits.float().argmax(1)


def found_state(model: Any) -> Any:
    """Return everything that an attack must leave as it is, with the values of all tensors."""
    rng = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    switches = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if not isinstance(model, nn.Module):
        return (rng[0].tolist(), rng[1:], switches), []
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = [(name, id(t), t.dtype, t.requires_grad, t.grad is None, type(t)) for name, t in named]
    modules = [
        (id(m), m.training, sorted(vars(m)), hooks(m))
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)
    ]
    lazy = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    values = [t.detach().clone() for _, t in named if not isinstance(t, lazy) and not t.is_meta]
    return (kept, modules, rng[0].tolist(), rng[1:], switches), values


def evaluated(model: Any, x: Tensor, y: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluation = EnsembleEvaluation(model, CHAIN, ["apgd", "square"], False, None)
        return evaluation.evaluate(x, y, bs=3, sanity=False)


def assert_left_as_found(model: Any, before: Any) -> None:
    after = found_state(model)
    assert after[0] == before[0]
    assert all(torch.equal(a, b) for a, b in zip(after[1], before[1], strict=True))


def test_there_are_a_hundred() -> None:
    assert len({*RIGHT, *SENTENCE, *RANDOM}) >= 100
    assert CLASSES == 4


@pytest.mark.parametrize("kind", RIGHT)
def test_the_model_confirms_the_verdict(kind: str) -> None:
    model, x = seeded(RIGHT[kind]), images()
    if kind == "lazy layers":  # the first images make their weights
        seeded(lambda: model(x))
    y = predicted(model if kind == "lazy layers" else seeded(RIGHT[kind]), x)
    y[0] = (y[0] + 1) % CLASSES
    before, given = found_state(model), x.clone()
    result = evaluated(model, x, y)
    assert_left_as_found(model, before)
    assert torch.equal(x, given)
    assert bool(BALL.contains(x, result.x_adv).all())
    labels = predicted(model, result.x_adv)
    assert torch.equal(result.labels, labels)
    broken = torch.tensor([by != "" for by in result.broken_by])
    assert torch.equal(broken, labels != y)
    assert result.broken_by[0] == "clean"


@pytest.mark.parametrize("kind", SENTENCE)
def test_one_sentence_says_what_is_wrong(kind: str) -> None:
    make, part = SENTENCE[kind]
    model, x = seeded(make), images()
    before = found_state(model)
    with pytest.raises(BadInput) as error:
        evaluated(model, x, torch.arange(COUNT) % CLASSES)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert_left_as_found(model, before)


@pytest.mark.parametrize("kind", RANDOM)
def test_random_models_are_attacked_and_left_as_found(kind: str) -> None:
    model, x = seeded(RANDOM[kind]), images()
    y = torch.arange(COUNT) % CLASSES
    before = found_state(model)
    if kind in ("Python's generator", "NumPy's generator"):
        before = None
    result = evaluated(model, x, y)
    assert bool(BALL.contains(x, result.x_adv).all())
    if before is not None:  # these generators belong to the model, which moves them on
        assert_left_as_found(model, before)
