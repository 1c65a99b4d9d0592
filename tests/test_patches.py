"""Queries of images that change in one small square: the values of the whole net."""

import pytest
import torch
from torch import Tensor

from demur.attacks import AcceptedError, MinMargin, Square, UntargetedMargin
from demur.attacks.attack_model import ObjectiveFunction, PatchQueries, PlainModel, exact_value
from demur.attacks.balls import L2, Linf
from demur.data import CIFAR10
from demur.engine.fused_resnet import FusedResNet
from demur.engine.patches import (
    SQUARE,
    PatchedStage,
    first_stage,
    pays,
    stage_bytes,
    window_side,
)
from demur.methods import RR
from demur.nets import RejectingNet, WideResNet
from demur.output import Output
from demur.rejectors import Con
from tests.test_fused_resnet import net, replace_kernels

__all__ = ["net"]  # a fixture


def squares(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Corners of squares anywhere in an image, the first two at its edges, and which are kept."""
    corner = torch.randint(0, 33 - SQUARE, (count, 2), generator=g)
    corner[0], corner[1] = 0, 32 - SQUARE
    return corner, torch.rand(count, generator=g) < 0.5


def with_squares(x: Tensor, corner: Tensor, g: torch.Generator) -> Tensor:
    """The images with random pixels in a square of each."""
    x = x.clone()
    for image, (top, left) in zip(x, corner.tolist(), strict=True):
        rows, columns = slice(top, top + SQUARE), slice(left, left + SQUARE)
        image[:, rows, columns] = torch.rand(3, SQUARE, SQUARE, generator=g)
    return x


def test_values_are_those_of_the_whole_net_while_squares_are_kept_or_not(
    net: RejectingNet,
) -> None:
    copy, g = FusedResNet(net.eval(), False, "fp32"), torch.Generator().manual_seed(0)
    x, y = torch.rand(6, 3, 32, 32, generator=g), torch.arange(6)
    stage, kept = PatchedStage(copy, x.shape), torch.zeros(6, dtype=torch.bool)
    assert window_side(stage.depth) == 15
    tensors = (stage.stored, stage.windows, stage.output, stage.undo)
    assert stage_bytes(copy, x.shape) == sum(part.nbytes for part in tensors)
    stage.fill(x)
    for _ in range(6):
        corner, keep = squares(6, g)
        proposal = with_squares(x, corner, g)
        _, value, out = stage.value(UntargetedMargin(), proposal, y, corner, kept)
        expected, expected_out = exact_value(net, UntargetedMargin(), proposal, y)
        assert torch.allclose(value, expected, rtol=1e-4, atol=1e-5)
        assert torch.allclose(out.aux, expected_out.aux, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(value, exact_value(net, UntargetedMargin(), x, y)[0], rtol=1e-4)
        kept, x = keep, torch.where(keep[:, None, None, None], proposal, x)
    with torch.no_grad():
        net.trunk.get_parameter("stem.weight").mul_(2)
    copy.refresh()
    stage.fill(x)
    _, value, _ = stage.value(UntargetedMargin(), x, y, corner, torch.zeros_like(kept))
    expected, _ = exact_value(net, UntargetedMargin(), x, y)
    assert torch.allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_patches_pay_where_the_window_is_small(net: RejectingNet) -> None:
    trunk = FusedResNet(net.eval(), False, "fp32").fused_trunk
    assert first_stage(trunk) == 2
    assert pays(trunk, 32, 32)
    assert not pays(trunk, 16, 32)
    assert not pays(trunk, 14, 200)
    assert not pays(FusedResNet(net, True, "fp32").fused_trunk, 32, 32)


def test_patches_need_a_first_stage_without_a_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(monkeypatch)
    wide = WideResNet(depth=10, widen=2).build(CIFAR10().domain, RR()).eval()
    trunk = FusedResNet(wide, False, "fp32").fused_trunk
    assert first_stage(trunk) == 0
    assert not pays(trunk, 32, 32)


class PatchedModel(PlainModel):
    """A model whose patch queries check what Square tells them."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net)
        self.made, self.asked = 0, 0

    def patch_queries(
        self, objective: ObjectiveFunction, x: Tensor, side: int
    ) -> PatchQueries | None:
        if side > 5:
            return None
        self.made += 1
        current, last = x.clone(), x.clone()
        first = True

        def query(
            x: Tensor, y: Tensor, corner: Tensor, kept: Tensor, *inputs: Tensor
        ) -> tuple[Tensor, Output]:
            nonlocal first
            if not first:
                current[kept] = last[kept]
            first = False
            self.asked += 1
            for changed, (top, left) in zip((x != current).any(1), corner.tolist(), strict=True):
                changed[top : top + side, left : left + side] = False
                assert not changed.any()
            last.copy_(x)
            return exact_value(self, objective, x, y, *inputs)

        return query


@pytest.mark.parametrize("accepted", [False, True])
def test_square_describes_its_squares(accepted: bool) -> None:
    """The result is the same bit by bit, also after images left."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5)).requires_grad_(False)
    x = torch.rand(40, 3, 8, 8)
    y = net(x).argmax(1)
    attack = Square(Linf(0.03), queries=300)
    if accepted:
        criterion = AcceptedError(Con(), 0.3)
        attack = Square(
            Linf(0.05), queries=300, objective=MinMargin(criterion), criterion=criterion
        )
    model = PatchedModel(net)
    found = attack.perturb(model, x, y, torch.arange(40))
    assert torch.equal(found, attack.perturb(net, x, y, torch.arange(40)))
    assert model.made > 1, "no image left"
    assert model.asked > 200


def test_l2_has_no_patches() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5)).requires_grad_(False)
    model, x = PatchedModel(net), torch.rand(4, 3, 8, 8)
    Square(L2(0.1), queries=150).perturb(model, x, net(x).argmax(1), torch.arange(4))
    assert not model.made
