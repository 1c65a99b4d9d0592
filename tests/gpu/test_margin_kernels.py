"""The kernel that plays the game of MaxMinMargin against tensor operations."""

import pytest
import torch

from demur.attacks import kernels
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.margins import initial_state, solve_game


@pytest.mark.parametrize("ball", [Linf(8 / 255), L2(0.5)])
@pytest.mark.parametrize("margins", [2, 3])
@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (1, 1, 7, 9)])
def test_a_game(
    device: torch.device,
    ball: Ball,
    margins: int,
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.rand(shape, generator=generator, device=device)
    start = ball.project(x, x + 0.01 * torch.randn(shape, generator=generator, device=device))
    state = initial_state(start, margins)
    state.grads.normal_(generator=generator)
    state.values.normal_(generator=generator)
    state.games.random_(3, generator=generator)
    assert kernels.game_fits(state.grads)
    average, weights = solve_game(ball, x, state)
    monkeypatch.setattr(kernels, "AVAILABLE", False)
    expected, expected_weights = solve_game(ball, x, state)
    assert torch.allclose(average, expected, atol=1e-5)
    assert torch.allclose(weights, expected_weights, atol=1e-5)


def test_large_images_do_not_fit(device: torch.device) -> None:
    assert not kernels.game_fits(torch.zeros(1, 2, 3 * 224 * 224, device=device))
