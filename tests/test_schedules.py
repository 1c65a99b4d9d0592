"""Learning-rate schedules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demur.recipes import OneCycle, Piecewise


def test_piecewise_drops_at_the_papers_epochs() -> None:
    rate, batches, epochs = Piecewise(), 391, 110

    def rate_at(epoch: int, step: int) -> float:
        return rate((epoch * batches + step + 1) / (epochs * batches))

    assert rate_at(0, 0) == pytest.approx(0.1)
    assert rate_at(99, 389) == pytest.approx(0.1)
    assert rate_at(99, 390) == pytest.approx(0.01)  # the step that completes epoch 100
    assert rate_at(104, 389) == pytest.approx(0.01)
    assert rate_at(104, 390) == pytest.approx(0.001)
    assert rate_at(109, 390) == pytest.approx(0.001)


@settings(max_examples=50)
@given(st.floats(0.01, 0.99), st.floats(0, 1))
def test_one_cycle_rises_to_the_peak_and_falls_to_zero(warmup: float, progress: float) -> None:
    rate = OneCycle(0.2, warmup=warmup)
    assert 0 <= rate(progress) <= 0.2 * (1 + 1e-9)
    assert rate(warmup) == pytest.approx(0.2)
    assert rate(1.0) == pytest.approx(0)
    assert rate(warmup / 2) == pytest.approx(0.1)
