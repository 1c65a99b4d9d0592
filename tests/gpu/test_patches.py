"""Patch queries: the kernels against indexing, and captured queries against the whole net."""

import pytest
import torch

from demur.attacks import CE, Square, UntargetedMargin
from demur.attacks.attack_model import exact_value
from demur.attacks.balls import Linf
from demur.engine import FrozenModel, frozen
from demur.engine.patches import SQUARE, store_windows
from demur.numerics import Precision
from tests.gpu.tools import PRECISIONS, distance, images, random_net
from tests.test_patches import squares, with_squares

UNTARGETED = UntargetedMargin()


@pytest.mark.parametrize("channels", [64, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("border", [0, 1])
def test_windows_are_stored_as_by_indexing(
    device: torch.device, dtype: torch.dtype, channels: int, border: int
) -> None:
    g = torch.Generator().manual_seed(0)
    rows, columns = (torch.randint(0, n - 14, (9,), generator=g) for n in (23, 31))
    origins = torch.stack((rows, columns), 1)
    origins[0], origins[-1] = 0, torch.tensor([8, 16])
    size = 23 + 2 * border, 31 + 2 * border
    maps = torch.randn(5, 9, *size, channels, generator=g).to(dtype)
    windows = torch.randn(5, 9, 15, 15, channels, generator=g).to(dtype)
    found, chosen = [], torch.arange(9) % 2 == 0
    for where in (torch.device("cpu"), device):
        changed, undo = maps.to(where).clone(), torch.zeros_like(windows, device=where)
        arguments = windows.to(where), origins.to(where), chosen.to(where), border
        store_windows(changed, *arguments, undo)
        twice = changed.clone()
        store_windows(twice, undo, *arguments[1:])
        assert torch.equal(twice.cpu(), maps)
        found.append((changed.cpu(), undo.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], maps)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_patches_have_the_values_of_the_net(
    device: torch.device,
    precision: Precision,
    layout: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after images left, with the same graph and with that of another size."""
    net = random_net(device, width=64).eval().requires_grad_(False)
    model, g = FrozenModel(net, precision, "none", fixed=64), torch.Generator().manual_seed(0)
    x, y = images(device, 60)
    assert model.patch_queries(UNTARGETED, x, 10) is None
    for count in (60, 58, 20):
        x, y = x[:count], y[:count]
        queries, kept = model.patch_queries(UNTARGETED, x, SQUARE), torch.ones(count).bool()
        assert queries is not None
        for _ in range(3):
            corner, keep = squares(count, g)
            proposal = with_squares(x.cpu(), corner, g).to(x)
            proposal = proposal.contiguous(memory_format=layout)
            value, out = queries(proposal, y, corner.to(device), kept.to(device))
            exact, exact_out = exact_value(model, UNTARGETED, proposal, y)
            whole, _ = model.value(UNTARGETED, proposal, y)
            allowed = max(1e-3, 2 * distance(whole, exact))
            assert distance(value, exact) < allowed
            assert len(out.aux) == count
            assert distance(out.logits, exact_out.logits) < max(1e-3, allowed)
            change = distance(exact_value(model, UNTARGETED, x, y)[0], exact)
            assert precision == "bf16" or change > 3 * allowed
            kept = keep
            x = torch.where(keep.to(device)[:, None, None, None], proposal, x)
    assert len(model._patched) == 2
    monkeypatch.setattr(frozen, "MAX_PATCH_MEMORY", 0.0)
    assert model.patch_queries(UNTARGETED, x, SQUARE) is not None  # captured already
    assert model.patch_queries(CE(), x, SQUARE) is None


def test_square_finds_as_much_with_patches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of the last images agree with the exact net; searches differ by rounding."""
    net = random_net(device).eval().requires_grad_(False)
    x, _ = images(device, 96)
    y = net(x).logits.argmax(1)
    attack, index = Square(Linf(2 / 255), queries=1400), torch.arange(96, device=device)
    results = []
    for available in (True, False):
        if not available:
            monkeypatch.setattr(FrozenModel, "patch_queries", lambda *_: None)
        model = FrozenModel(net, "bf16", "none", fixed=96)
        found = attack.perturb(model, x, y, index)
        assert bool(model._patched) == available
        value = exact_value(net, UNTARGETED, found, y)[0]
        results.append((float((value > 0).float().mean()), float(value.mean())))
    (share, mean), (plain_share, plain_mean) = results
    start = float(exact_value(net, UNTARGETED, x, y)[0].mean())
    assert abs(share - plain_share) < 0.05
    assert mean - start > 0.95 * (plain_mean - start)
