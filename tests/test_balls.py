"""Balls: starts, steps and projections."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demur.attacks.balls import L2, Ball, Linf

BALLS: tuple[type[Ball], ...] = (Linf, L2)
radii = st.floats(0, 1)


@pytest.mark.parametrize("kind", BALLS)
@given(seed=st.integers(0, 10**6), eps=radii, length=st.floats(0, 3))
def test_start_and_step_stay_in_the_ball_and_the_pixel_range(
    kind: type[Ball], seed: int, eps: float, length: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 2, 4, 4, generator=g)
    ball = kind(eps)
    x_adv = ball.start(x, seed, torch.arange(3), 0)
    for _ in range(2):
        assert ball.norm(x_adv - x).max() <= eps * (1 + 1e-5) + 1e-6
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1
        x_adv = ball.step(x, x_adv, torch.randn(x.shape, generator=g), length)


def test_steps_by_hand() -> None:
    x = torch.full((1, 1, 1, 2), 0.5)
    grad = torch.tensor([3.0, -4.0]).view(1, 1, 1, 2)
    assert Linf(1).step(x, x, grad, 0.1).flatten().tolist() == pytest.approx([0.6, 0.4])
    assert L2(1).step(x, x, grad, 0.1).flatten().tolist() == pytest.approx([0.56, 0.42])
    assert L2(0.05).step(x, x, grad, 0.1).flatten().tolist() == pytest.approx([0.53, 0.46])


@pytest.mark.parametrize("kind", BALLS)
def test_zero_gradient_and_zero_radius_leave_images_unchanged(kind: type[Ball]) -> None:
    x = torch.rand(2, 1, 3, 3)
    assert torch.equal(kind(0.1).step(x, x, torch.zeros_like(x), 0.1), x)
    assert torch.allclose(kind(0).start(x, 0, torch.arange(2), 0), x)


def test_linf_start_fills_the_ball_and_l2_radius_is_uniform() -> None:
    x = torch.full((2000, 1, 4, 4), 0.5)
    delta = Linf(0.1).start(x, 0, torch.arange(2000), 0) - x
    assert delta.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    radius = L2(0.2).norm(L2(0.2).start(x, 0, torch.arange(2000), 0) - x)
    assert radius.mean().item() == pytest.approx(0.1, rel=0.05)  # eps * U(0, 1)
