"""WorstScore finds the highest score of a wrong prediction; WorstCase counts accepted errors."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur import (
    APGD,
    AcceptedError,
    BadInput,
    Con,
    Coupled,
    Energy,
    Linf,
    ModelScore,
    Output,
    RCon,
    WorstScore,
)
from demur.attacks import MaxMinMargin, RejectAutoAttackEnsemble, autoattack
from demur.attacks.attack_model import Model
from demur.metrics import WorstCase
from demur.output import as_output
from tests.samples import EXHAUSTIVE

EPS = 0.1


@dataclass
class Linear:
    """Logits x w with a second output x v, both linear in the pixels."""

    w: Tensor  # D, K
    v: Tensor  # D

    def __call__(self, x: Tensor) -> Output:
        flat = x.flatten(1)
        return Output(flat @ self.w, flat, (flat @ self.v)[:, None])


def images(n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 0.3 + 0.4 * torch.rand(n, 1, 4, 4, generator=generator)  # the box never binds
    return x, torch.randint(0, 3, (n,), generator=generator)


def linear(classes: int, seed: int = 1) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(16, classes, generator=generator)
    return Linear(w, torch.randn(16, generator=generator))


def worst(model: Model, attack: WorstScore, x: Tensor, y: Tensor) -> Tensor:
    out = as_output(model(attack(model, x, y)))
    score = attack.rejector(out)  # type: ignore[operator]
    return score.masked_fill(out.logits.argmax(-1) == y, -torch.inf)


def test_two_classes_reach_the_closed_form() -> None:
    model, (x, y) = linear(2), images()
    y = y.clamp(max=1)
    other = 1 - y
    direction = (model.w[:, other] - model.w[:, y]).t()  # N, D
    margin = (x.flatten(1) * direction).sum(1) + EPS * direction.abs().sum(1)
    expected = margin.sigmoid().masked_fill(margin < 0, -torch.inf)
    found = worst(model, WorstScore(Linf(EPS), Con(), steps=20), x, y)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_score_of_the_model_reaches_the_solution_of_the_linear_program() -> None:
    from scipy.optimize import linprog

    model, (x, y) = linear(3), images(8)
    found = worst(model, WorstScore(Linf(EPS), ModelScore(), steps=100, restarts=2), x, y)
    for row in range(len(x)):
        best, pixels = -np.inf, x[row].flatten().double().numpy()
        for target in set(range(3)) - {int(y[row])}:
            others = [k for k in range(3) if k != target]
            bound = (model.w[:, others] - model.w[:, [target]]).double().t().numpy()
            box = [(p - EPS, p + EPS) for p in pixels]
            solved = linprog(-model.v.double().numpy(), bound, np.zeros(2), bounds=box)
            best = max(best, -solved.fun) if solved.success else best
        assert found[row] <= best + 1e-4
        if np.isfinite(best):
            span = EPS * float(model.v.abs().sum())
            assert found[row] >= best - 0.05 * span, (row, float(found[row]), best)
        else:
            assert found[row] == -torch.inf


def test_images_without_a_wrong_prediction_are_returned_unchanged() -> None:
    model, (x, _) = linear(3), images()
    y = model(x).logits.argmax(-1)
    attack = WorstScore(Linf(1e-6), Con(), steps=3)
    assert torch.equal(attack(model, x, y), x)


def test_a_prediction_that_barely_becomes_wrong_is_found() -> None:
    """Steps that also raise the score leave the only corner where the prediction is wrong."""
    model, (x, _) = linear(2, seed=0), images()
    y, direction = torch.zeros(len(x), dtype=torch.long), model.w[:, 1] - model.w[:, 0]
    reach = 0.99 * EPS * direction.abs().sum() + x.flatten(1) @ direction
    x = x - (reach[:, None] * direction / direction.square().sum()).view_as(x)
    assert (model(x).logits.argmax(-1) == y).all()
    found = worst(model, WorstScore(Linf(EPS), ModelScore(), steps=20), x, y)
    assert found.isfinite().all()


def test_a_wrong_clean_image_counts() -> None:
    model, (x, y) = linear(3), images()
    found = worst(model, WorstScore(Linf(1e-6), Con(), steps=3), x, y)
    out = model(x)
    wrong = out.logits.argmax(-1) != y
    assert wrong.any()
    assert (found[wrong] >= Con()(out)[wrong]).all()


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "rejector",
    [
        RCon(), pytest.param(Con(), marks=LONG), pytest.param(Energy(), marks=LONG),
        pytest.param(Coupled(Con(), 0.4, RCon()), marks=LONG),
    ],
)  # fmt: skip
def test_no_threshold_has_more_accepted_errors_under_a_targeted_ensemble(
    rejector: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small net, an aimed attack at a threshold finds at most one image more."""
    if not EXHAUSTIVE:
        monkeypatch.setattr(autoattack, "APGD", partial(APGD, steps=30))
        short = partial(MaxMinMargin, steps=20)
        monkeypatch.setattr(
            autoattack, "MaxMinMargin", lambda ball, rule, seed, **_: short(ball, rule, seed=seed)
        )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 5))

    def model(x: Tensor) -> Output:
        z = 3 * net(x)
        return Output(z[:, :4], z[:, :0], z[:, 4:])

    x, y = images(12)
    attack = WorstScore(Linf(EPS), rejector, steps=30)  # type: ignore[arg-type]
    with torch.no_grad():
        found = worst(model, attack, x, y)
    reached = found[found.isfinite()]
    assert len(reached) > 1
    for t in (float(reached.quantile(q)) for q in (0.5,)):
        criterion = AcceptedError(rejector, t)  # type: ignore[arg-type]
        aimed = RejectAutoAttackEnsemble(Linf(EPS), criterion, version="fast")
        success = criterion(as_output(model(aimed(model, x, y))), y)
        assert int((found >= t).sum()) >= int(success.sum()) - 1


def test_the_result_does_not_depend_on_the_batch() -> None:
    model, (x, y) = linear(3), images(6)
    attack = WorstScore(Linf(EPS), RCon(), steps=5)
    whole = attack(model, x, y)
    last = attack(model, x[4:], y[4:], index=torch.arange(4, 6))
    torch.testing.assert_close(whole[4:], last)


def test_it_is_stronger_than_one_ascent() -> None:
    model, (x, y) = linear(3), images(12)
    one = APGD(Linf(EPS), steps=20)(model, x, y)
    out = model(one)
    single = Con()(out).masked_fill(out.logits.argmax(-1) == y, -torch.inf)
    assert (worst(model, WorstScore(Linf(EPS), Con(), steps=20), x, y) >= single - 1e-4).all()


# ------------------------------------------------ WorstCase


def test_worst_case_numbers_equal_brute_force() -> None:
    generator = np.random.default_rng(0)
    for n in (1, 2, 7, 40):
        clean = generator.integers(0, 8, n) / 8  # with ties
        worst_score = np.where(generator.random(n) < 0.3, -np.inf, generator.integers(0, 8, n) / 8)
        case = WorstCase.of(clean, worst_score)
        errors = [np.mean(worst_score >= t) for t in clean]
        assert case.augrc == pytest.approx(np.mean(errors))
        risks = []
        for t, error in zip(clean, errors, strict=True):
            correct = np.mean((clean >= t) & (worst_score < t))
            risks.append(error / (error + correct))
        assert case.aurc == pytest.approx(np.mean(risks))
        for coverage, error, t in zip(*case.curve, strict=True):
            assert coverage == pytest.approx(np.mean(clean >= t))
            assert error == pytest.approx(case.accepted_errors(t))
        assert (np.diff(case.curve.risk) >= 0).all()


def test_the_interval_of_a_difference_covers() -> None:
    """Of 200 samples the 95% interval misses the true difference at most 20 times."""
    generator = np.random.default_rng(1)

    def cases(n: int) -> tuple[WorstCase, WorstCase]:
        base, noise = generator.normal(size=(2, n)), generator.normal(size=(2, n))
        return WorstCase.of(base[0], base[1] - 0.5), WorstCase.of(
            base[0] + 0.5 * noise[0], base[1] - 0.8 + 0.5 * noise[1]
        )

    first, second = cases(200_000)
    true = first.augrc - second.augrc
    misses = 0
    for _ in range(200):
        one, other = cases(150)
        gap = one.augrc_difference(other)
        misses += not gap.lo <= true <= gap.hi
    assert misses <= 20


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(BadInput, match="numbers of images differ"):
        WorstCase.of([0.1, 0.2], [0.1])
