"""Rules: verdicts, margins, coupling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demur.output import Output, con, rcon
from demur.rejectors import Con, Coupled, Energy, RCon


def random_output(seed: int, n: int = 64) -> Output:
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 5, generator=g)
    return Output(logits, logits[:, :0], torch.randn(n, 1, generator=g))


@given(st.integers(0, 1000), st.floats(0.05, 0.95))
def test_accepted_is_at_least_t_and_the_margin_says_by_how_much(seed: int, t: float) -> None:
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
def test_coupled_accepts_where_both_do(seed: int, gate: float, t: float) -> None:
    out = random_output(seed)
    pair = Coupled(gate_threshold=gate)
    both = (con(out) >= gate) & (rcon(out) >= t)
    assert torch.equal(pair.rule(t).accepted(out), both)
    assert torch.equal(pair(out) >= t, both)
    assert torch.equal(pair.rule(t).margin(out), torch.minimum(con(out) - gate, rcon(out) - t))


def test_before_the_gate_comes_last() -> None:
    out = random_output(3)
    score = Coupled(gate_threshold=0.6)(out)
    past = con(out) >= 0.6
    assert 0 < past.sum() < len(past)
    assert score[~past].max() == -torch.inf
    assert torch.equal(score[past], rcon(out)[past])


def test_coupled_gives_an_attacker_a_gradient_before_the_gate() -> None:
    logits = torch.tensor([[0.1, 0.0, 0.0]], requires_grad=True)
    out = Output(logits, logits[:, :0], torch.zeros(1, 1))
    (grad,) = torch.autograd.grad(Coupled().log_score(out).sum(), logits)
    assert grad.abs().sum() > 0


def test_unfitted_rejectors_are_a_programming_error() -> None:
    from demur.rule import Rejector, Score, as_score

    class NotYet(Rejector):
        def fit(self, out: Output, y: torch.Tensor) -> Score:
            return Con()

    with pytest.raises(TypeError, match="not fitted"):
        as_score(NotYet())
