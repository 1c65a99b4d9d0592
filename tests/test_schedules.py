"""Learning rates over a run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demur.methods import (
    OneCycle,
    Piecewise,
)  # fmt: skip


def test_the_papers_schedule_at_its_own_length() -> None:
    rate, batches, epochs = Piecewise(), 391, 110

    def after(epoch: int, step: int) -> float:
        return rate((epoch * batches + step + 1) / (epochs * batches))

    assert after(0, 0) == pytest.approx(0.1)
    assert after(99, 389) == pytest.approx(0.1)
    assert after(99, 390) == pytest.approx(0.01)  # the step that completes epoch 100
    assert after(104, 389) == pytest.approx(0.01)
    assert after(104, 390) == pytest.approx(0.001)
    assert after(109, 390) == pytest.approx(0.001)


@settings(max_examples=50)
@given(st.floats(0.01, 0.99), st.floats(0, 1))
def test_one_cycle_is_a_triangle(warmup: float, progress: float) -> None:
    rate = OneCycle(0.2, warmup=warmup)
    assert 0 <= rate(progress) <= 0.2 * (1 + 1e-9)
    assert rate(warmup) == pytest.approx(0.2)
    assert rate(1.0) == pytest.approx(0)
    assert rate(warmup / 2) == pytest.approx(0.1)
