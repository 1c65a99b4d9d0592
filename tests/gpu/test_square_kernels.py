"""The kernels of Square against tensor operations, bit by bit."""

import itertools

import pytest
import torch
from torch import Tensor

from demur.attacks import kernels
from demur.attacks.balls import Linf
from demur.attacks.square import Square, SquareDraw, SquareState

SHAPES = [(257, 3, 32, 32), (1, 3, 32, 32), (5, 1, 7, 29), (3, 2, 31, 1), (4, 4, 1, 1)]

FORMATS = [  # of clean and current images
    (torch.contiguous_format, torch.contiguous_format),
    (torch.channels_last, torch.channels_last),
    (torch.channels_last, torch.contiguous_format),
]


def random(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator).to(device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [0, 8 / 255, 0.3])
@pytest.mark.parametrize("layouts", FORMATS, ids=str)
def test_proposals_are_those_of_tensor_operations(
    device: torch.device,
    shape: tuple[int, ...],
    eps: float,
    layouts: tuple[torch.memory_format, torch.memory_format],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attack = Square(Linf(eps))
    x = random(device, *shape).round(decimals=1)  # some pixels are 0 or 1
    x_adv = attack.ball.project(x, x + 2 * eps * (random(device, *shape, seed=1) - 0.5))
    x, x_adv = (
        part.contiguous(memory_format=f) for part, f in zip((x, x_adv), layouts, strict=True)
    )
    for side in range(1, min(29, *shape[2:]) + 1):
        monkeypatch.setattr(Square, "_side", lambda *_, side=side: side)
        numbers = random(device, shape[0], 3, 5 + shape[1], seed=side)
        numbers[0, 1, :2], numbers[-1, 1, :2] = 0, 1 - 2**-24  # the first and the last corner
        draw = SquareDraw(numbers[:, 1], x)
        found = []
        for available in (True, False):
            monkeypatch.setattr(kernels, "AVAILABLE", available)
            assert kernels.square_fits(x, x_adv, draw.uniforms) == available
            found.append(attack._propose(draw, x_adv, 1))
        proposal, expected = found
        assert torch.equal(proposal, expected)
        assert eps == 0 or not torch.equal(proposal, x_adv)


@pytest.mark.parametrize("count", [1, 257])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layouts", FORMATS, ids=str)
def test_updates_are_those_of_tensor_operations(
    device: torch.device,
    count: int,
    first: bool,
    exact: bool,
    layouts: tuple[torch.memory_format, torch.memory_format],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x_adv, proposal = (
        random(device, count, 3, 19, 23, seed=seed).contiguous(memory_format=layout)
        for seed, layout in enumerate(layouts)
    )
    flags = torch.tensor([*itertools.product([False, True], repeat=3)] * 33, device=device)
    candidate, refuted, new_candidate = flags[:count].unbind(1)
    before = random(device, count, seed=2).round(decimals=1)
    value = random(device, count, seed=3).round(decimals=1)  # often equal
    value[::50] = torch.nan
    state = SquareState(x_adv, before, candidate, refuted, x_adv)
    found = []
    for available in (True, False):
        monkeypatch.setattr(kernels, "AVAILABLE", available)
        found.append(state.update(proposal, value, new_candidate, first, exact))
    for name in ("x_adv", "value", "candidate", "refuted"):
        ours, theirs = (getattr(one, name) for one in found)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


def test_other_dtypes_and_devices_use_tensor_operations(device: torch.device) -> None:
    x = torch.zeros(2, 3, 4, 4)
    assert not kernels.square_fits(x)
    assert not kernels.square_fits(x.to(device).double())
    assert kernels.square_fits(x.to(device))
