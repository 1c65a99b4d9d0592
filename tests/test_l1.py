"""The L1 ball: exact projection, Auto-PGD, FAB and Square, beside brute force and the peer."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from demur.attacks import APGD, FAB, PGD, AutoAttackEnsemble, Square
from demur.attacks.balls import L1
from demur.attacks.fab import project_to_hyperplane
from demur.audits import AutoAttack
from demur.data import Images
from demur.errors import BadInput
from demur.output import prediction
from tests.linear import LinearNet, centred_images
from tests.quick_net import QuickNet


def images(seed: int, count: int = 3, shape: tuple[int, ...] = (2, 3, 3)) -> tuple[Tensor, Tensor]:
    """Images, some of whose pixels are 0 or 1, and points around them."""
    g = torch.Generator().manual_seed(seed)
    x = (1.4 * torch.rand(count, *shape, generator=g, dtype=torch.float64) - 0.2).clamp(0, 1)
    return x, x + 2 * torch.randn(x.shape, generator=g, dtype=torch.float64)


def bisected(x: Tensor, point: Tensor, eps: float) -> Tensor:
    """The projection by bisection of the multiplier of the L1 constraint."""
    delta = point - x
    room = torch.where(delta > 0, 1 - x, x)
    low, high = torch.zeros(len(x), 1, 1, 1).double(), delta.abs().amax((1, 2, 3), keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        change = (delta.abs() - middle).clamp_min(0).minimum(room)
        too_far = change.sum((1, 2, 3), keepdim=True) > eps
        low, high = torch.where(too_far, middle, low), torch.where(too_far, high, middle)
    inside = delta.abs().minimum(room).sum((1, 2, 3), keepdim=True) <= eps
    return x + delta.sign() * (delta.abs() - torch.where(inside, 0, high)).clamp_min(0).minimum(
        room
    )


class TestProjection:
    @given(seed=st.integers(0, 10**6), eps=st.floats(0, 12))
    def test_equals_a_bisection(self, seed: int, eps: float) -> None:
        x, point = images(seed)
        found = L1(eps).project(x, point)
        assert torch.allclose(found, bisected(x, point, eps), atol=1e-9)
        assert L1(eps).contains(x, found).all()
        assert torch.allclose(L1(eps).project(x, found), found, atol=1e-9)

    @pytest.mark.parametrize("eps", [0.5, 1.5, 4.0])
    def test_equals_a_quadratic_program(self, eps: float) -> None:
        x, point = images(1, count=2, shape=(1, 2, 3))
        found = L1(eps).project(x, point)
        for image, target, ours in zip(x, point, found, strict=True):
            flat, goal = image.flatten().numpy(), target.flatten().numpy()
            # the change is up - down with up in [0, 1 - x] and down in [0, x]
            bounds = [(0, 1 - p) for p in flat] + [(0, p) for p in flat]
            theirs = minimize(
                lambda v, flat=flat, goal=goal: ((flat + v[:6] - v[6:] - goal) ** 2).sum(),
                np.full(12, eps / 50),
                bounds=bounds,
                constraints={"type": "ineq", "fun": lambda v: eps - v.sum()},
                method="SLSQP",
                options={"ftol": 1e-12, "maxiter": 500},
            )
            assert theirs.success
            best = flat + theirs.x[:6] - theirs.x[6:]
            assert np.allclose(ours.flatten().numpy(), best, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_large_images_stay_in_the_ball(self, dtype: torch.dtype) -> None:
        x = torch.rand(2, 3, 128, 128, dtype=dtype)
        found = L1(12).project(x, x + torch.randn_like(x))
        assert L1(12).contains(x, found).all()
        assert (L1(12).norm(found - x) > 11.99).all()

    def test_equal_changes_are_lowered_equally(self) -> None:
        x = torch.full((1, 1, 2, 2), 0.5)
        assert torch.allclose(L1(1).project(x, x - 1), x - 0.25)
        assert torch.equal(L1(0).project(x, x - 1), x)


@given(seed=st.integers(0, 10**6), rise=st.floats(-8, 8), eps=st.floats(0, 9))
def test_hyperplanes_and_farthest_points_are_those_of_a_linear_program(
    seed: int, rise: float, eps: float
) -> None:
    x, point = images(seed, count=1)
    grad = point - x
    flat, w = x.flatten().numpy(), grad.flatten().numpy()
    bounds = [(0, 1 - p) for p in flat] + [(0, p) for p in flat]
    both, ones = np.concatenate((w, -w)), np.ones(2 * len(w))
    far = linprog(-both, A_ub=ones[None], b_ub=[eps], bounds=bounds)
    ours = (L1(eps).farthest(x, grad) - x).flatten().numpy()
    assert L1(eps).contains(x, x + torch.as_tensor(ours).view_as(x)).all()
    assert w @ ours == pytest.approx(-far.fun, abs=1e-6)
    near = linprog(ones, A_eq=both[None], b_eq=[rise], bounds=bounds)
    delta = project_to_hyperplane(L1(eps), x, grad, torch.tensor([rise]).double())
    assert ((x + delta).clamp(0, 1) - x - delta).abs().max() < 1e-9
    if near.status == 0:
        assert float((delta * grad).sum()) == pytest.approx(rise, abs=1e-6)
        assert float(delta.abs().sum()) == pytest.approx(near.fun, abs=1e-6)


ATTACKS = (
    APGD(L1(1.0), steps=20), PGD(L1(1.0), steps=20), FAB(L1(1.0), steps=10, restarts=2),
    Square(L1(1.0), queries=60), APGD(L1(1.0), steps=3, keep="max_objective"),
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_attacks_succeed_within_the_ball(
    attack: APGD, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    x_adv = attack(quick_net, x, y)  # raises where an image leaves the ball
    before, after = (int((prediction(quick_net(part)) == y).sum()) for part in (x, x_adv))
    assert after < before


def test_auto_pgd_finds_what_exists_on_a_linear_net() -> None:
    net, x = LinearNet(), centred_images(8)
    y = prediction(net(x))
    distance = FAB(L1(50.0), any_distance=True)(net, x, y) - x
    eps = float(distance.abs().flatten(1).sum(1).median())
    near = distance.abs().flatten(1).sum(1) <= 0.99 * eps
    broken = prediction(net(APGD(L1(eps), steps=60)(net, x, y))) != y
    assert near.any()
    assert broken[near].all()


def test_members_have_the_settings_of_the_authors() -> None:
    apgd, targeted, fab, square = AutoAttackEnsemble(L1(12)).chain().attacks
    assert (apgd.restarts, targeted.targets, fab.targets, square.queries) == (5, 5, 9, 5000)  # type: ignore[attr-defined]
    assert [APGD(L1(12), steps=steps).last_step for steps in (100, 3, 1)] == [40, 3, 1]
    with pytest.raises(BadInput, match="norm must be Linf, L2 or L1"):
        AutoAttack(LinearNet(), norm="L0")


def robust_counts(net: nn.Module, x: Tensor, y: Tensor, eps: float, names: list[str]) -> list[int]:
    """Images that no attack of those names breaks, by demur and by the authors' code."""
    peer = pytest.importorskip("pyautoattack")
    attack = AutoAttack(net, "L1", eps, 0, False, names, "custom", engine="plain")
    theirs = peer.AutoAttack(net, attacks=names, eps=eps, norm="L1", seed=0, version="custom")
    theirs.apgd.use_largereps = theirs.apgd_targeted.use_largereps = True
    theirs.apgd_targeted.n_target_classes = 5
    theirs.fab.n_restarts = 1
    x_adv = [
        attack.run_standard_evaluation(x, y, bs=len(x)),
        theirs.run_standard_evaluation(x, y, batch_size=len(x))[0],
    ]
    for images in x_adv:
        assert L1(eps).contains(x, images).all()
    return [int((net(images).argmax(1) == y).sum()) for images in x_adv]


def test_robust_accuracy_is_that_of_the_authors_code(
    quick_net: QuickNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 25))
    ours, theirs = robust_counts(quick_net.classifier().eval(), x, y, 2.0, ["apgd-ce"])
    assert 0 < theirs < 20
    assert abs(ours - theirs) <= 1, (ours, theirs)


@pytest.mark.skipif(not os.environ.get("DEMUR_EXHAUSTIVE"), reason="long: make exhaustive")
@pytest.mark.parametrize(
    "eps", [2.0, *(pytest.param(eps, marks=pytest.mark.exhaustive) for eps in (0.7, 4.0))]
)
@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t", "square"])
def test_each_member_is_as_strong_as_that_of_the_authors(
    quick_net: QuickNet, test_images: Images, name: str, eps: float
) -> None:
    x, y = test_images.batch(slice(0, 100))
    ours, theirs = robust_counts(quick_net.classifier().eval(), x, y, eps, [name])
    assert ours <= theirs + 1, (ours, theirs)
