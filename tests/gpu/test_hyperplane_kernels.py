"""The steps of FAB: the kernel against tensor operations with a sort of the pixels."""

import pytest
import torch
from torch import Tensor

from demur.attacks import FAB, kernels
from demur.attacks.attack import AttackBatch
from demur.balls import L2, Ball, Linf
from tests.linear import LinearNet, centred_images, distance

BALLS = pytest.mark.parametrize("ball", [Linf(8 / 255), L2(0.5)], ids=repr)


def next_iterate(attack: FAB, x: Tensor, x_adv: Tensor, grad: Tensor, margin: Tensor) -> Tensor:
    """One step of FAB on a linear function of each image."""
    batch = AttackBatch(LinearNet(), x, torch.zeros_like(margin).long(), margin, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FAB, "_nearest_margin", lambda *_: (grad, margin))
        return attack._next_iterate(batch, x_adv)


@BALLS
@pytest.mark.parametrize("shape", [(257, 3, 32, 32), (1, 1, 7, 9), (3, 3, 64, 64), (2, 1, 1, 1)])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 10.0, 1e4])
def test_steps_are_those_of_tensor_operations(
    device: torch.device,
    ball: Ball,
    shape: tuple[int, ...],
    scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Margins from tiny ones to ones that no image within the pixel range reaches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=generator).round(decimals=1).to(device)  # some are 0 or 1
    x_adv = (x + 0.1 * torch.randn(shape, generator=generator).to(device)).clamp(0, 1)
    grad = torch.randn(shape, generator=generator).to(device)
    grad[torch.rand(shape, generator=generator) < 0.1] = 0
    margin = scale * torch.randn(shape[0], generator=generator).to(device)
    margin[0] = 0
    attack = FAB(ball, alpha=0.3, overshoot=1.2)
    x_last, adv_last = (p.contiguous(memory_format=torch.channels_last) for p in (x, x_adv))
    found = [next_iterate(attack, x_last, adv_last, grad, margin)]
    for available in (True, False):
        monkeypatch.setattr(kernels, "AVAILABLE", available)
        assert kernels.hyperplane_fits(ball, grad) == available
        found.append(next_iterate(attack, x, x_adv, grad, margin))
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.allclose(found[1], found[2], atol=2e-5)
    assert found[1].amin() >= 0
    assert found[1].amax() <= 1
    assert shape[0] < 3 or (found[1] - x_adv).abs().amax() > 1e-5


@BALLS
def test_without_a_gradient_nothing_moves(device: torch.device, ball: Ball) -> None:
    x = torch.rand(2, 3, 8, 8, device=device)
    ones = torch.ones(2, device=device)
    assert torch.equal(next_iterate(FAB(ball), x, x, torch.zeros_like(x), ones), x)


@pytest.mark.parametrize("kind", [Linf, L2])
def test_fab_finds_the_distance_of_a_linear_net(device: torch.device, kind: type[Ball]) -> None:
    net, x = LinearNet().float().to(device), centred_images(12).float().to(device)
    y = net(x).logits.argmax(1)
    attack = FAB(kind(0.1), any_distance=True, steps=20)
    found = attack.ball.norm(attack(net, x, y) - x)
    assert torch.allclose(found, distance(net, x, y, kind.__name__), rtol=0.06)


def test_large_images_are_sorted(device: torch.device) -> None:
    assert not kernels.hyperplane_fits(Linf(0.1), torch.zeros(1, 3, 224, 224, device=device))
