"""Rules: decisions, margins, coupled scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demur.errors import BadInput
from demur.output import Output
from demur.rejectors import Con, Coupled, Energy, RCon
from demur.rejectors.certainty import con, rcon


def random_output(seed: int, n: int = 64) -> Output:
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 5, generator=g)
    return Output(logits, logits[:, :0], torch.randn(n, 1, generator=g))


@given(st.integers(0, 1000), st.floats(0.05, 0.95))
def test_a_rule_accepts_scores_of_at_least_t_and_its_margin_is_score_minus_t(
    seed: int, t: float
) -> None:
    out = random_output(seed)
    for score in (Con(), RCon(), Energy()):
        rule = score.rule(t)
        assert torch.equal(rule.accepted(out), score(out) >= t)
        assert torch.equal(rule.margin(out), score(out) - t)
        assert torch.equal(rule.accepted(out), rule.margin(out) >= 0)


def test_a_tie_with_the_threshold_is_accepted() -> None:
    out = random_output(0)
    t = float(con(out)[3])
    assert Con().rule(t).accepted(out)[3]


@given(st.integers(0, 1000), st.floats(0.3, 0.7), st.floats(0.1, 0.7))
def test_a_coupled_rule_accepts_where_both_scores_reach_their_thresholds(
    seed: int, gate: float, t: float
) -> None:
    out = random_output(seed)
    pair = Coupled(gate_threshold=gate)
    both = (con(out) >= gate) & (rcon(out) >= t)
    assert torch.equal(pair.rule(t).accepted(out), both)
    assert torch.equal(pair(out) >= t, both)
    assert torch.equal(pair.rule(t).margin(out), torch.minimum(con(out) - gate, rcon(out) - t))


def test_images_that_fail_the_gate_rank_last() -> None:
    out = random_output(3)
    score = Coupled(gate_threshold=0.6)(out)
    passes = con(out) >= 0.6
    assert 0 < passes.sum() < len(passes)
    assert score[~passes].max() == -torch.inf
    assert torch.equal(score[passes], rcon(out)[passes])


def test_the_coupled_log_score_has_a_gradient_below_the_gate() -> None:
    logits = torch.tensor([[0.1, 0.0, 0.0]], requires_grad=True)
    out = Output(logits, logits[:, :0], torch.zeros(1, 1))
    (grad,) = torch.autograd.grad(Coupled().log_score(out).sum(), logits)
    assert grad.abs().sum() > 0


def test_an_unfitted_rejector_raises() -> None:
    from demur.rejectors.rule import Rejector, Score, as_score

    class Unfitted(Rejector):
        def fit(self, out: Output, y: torch.Tensor) -> Score:
            return Con()

    with pytest.raises(BadInput, match="not fitted"):
        as_score(Unfitted())
