"""The projection of FAB onto a hyperplane: the kernel against a sort of the pixels."""

import pytest
import torch

from demur.attacks import FAB, kernels
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.fab import project_to_hyperplane
from tests.linear import LinearNet, centred_images, distance

BALLS = pytest.mark.parametrize("ball", [Linf(8 / 255), L2(0.5)], ids=repr)


@BALLS
@pytest.mark.parametrize("shape", [(257, 3, 32, 32), (1, 1, 7, 9), (3, 3, 64, 64), (2, 1, 1, 1)])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 10.0, 1e4])
def test_projections_are_those_of_the_sort(
    device: torch.device,
    ball: Ball,
    shape: tuple[int, ...],
    scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rises from tiny ones to ones that no image within the pixel range reaches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=generator).round(decimals=1).to(device)  # some are 0 or 1
    grad = torch.randn(shape, generator=generator).to(device)
    grad[torch.rand(shape, generator=generator) < 0.1] = 0
    rise = scale * torch.randn(shape[0], generator=generator).to(device)
    rise[0] = 0
    last = x.contiguous(memory_format=torch.channels_last)
    found = [project_to_hyperplane(ball, last, grad, rise)]
    for available in (True, False):
        monkeypatch.setattr(kernels, "AVAILABLE", available)
        assert kernels.hyperplane_fits(ball, grad) == available
        found.append(project_to_hyperplane(ball, x, grad, rise))
    assert torch.allclose(found.pop(0), found[0], atol=1e-6)
    assert torch.allclose(found[0], found[1], atol=2e-5)
    assert ((x + found[0]) >= -1e-6).all()
    assert ((x + found[0]) <= 1 + 1e-6).all()
    ours, theirs = ((grad * delta).double().flatten(1).sum(1) for delta in found)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    reached = ours.abs() >= 0.999 * rise.abs()
    assert torch.allclose(ours[reached].float(), rise[reached], rtol=1e-3, atol=1e-4)
    assert reached.any()


@BALLS
def test_without_a_gradient_nothing_moves(device: torch.device, ball: Ball) -> None:
    x = torch.rand(2, 3, 8, 8, device=device)
    rise = torch.ones(2, device=device)
    assert not project_to_hyperplane(ball, x, torch.zeros_like(x), rise).any()


@pytest.mark.parametrize("kind", [Linf, L2])
def test_fab_finds_the_distance_of_a_linear_net(device: torch.device, kind: type[Ball]) -> None:
    net, x = LinearNet().float().to(device), centred_images(12).float().to(device)
    y = net(x).logits.argmax(1)
    attack = FAB(kind(0.1), any_distance=True, steps=20)
    found = attack.ball.norm(attack(net, x, y) - x)
    assert torch.allclose(found, distance(net, x, y, kind.__name__), rtol=0.06)


def test_large_images_are_sorted(device: torch.device) -> None:
    assert not kernels.hyperplane_fits(Linf(0.1), torch.zeros(1, 3, 224, 224, device=device))
