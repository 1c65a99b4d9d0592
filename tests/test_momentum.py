"""PGD with momentum and backtracking, and the random starts of CCAT."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log

import pytest
import torch
from torch import Tensor, nn

from demur import noise
from demur.attacks import CE, KL, PGD, FrankWolfe, Objective, UntargetedMargin, WrongConfidence
from demur.attacks.attack_model import attack_model
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.pgd import initial_momentum, keep_or_undo_step, propose_step
from demur.data import Images
from demur.errors import BadInput
from demur.output import prediction
from tests.linear import LinearNet, centred_images
from tests.quick_net import QuickNet

BACK = PGD(
    Linf(0.1), steps=20, start="mixed", objective=WrongConfidence(), momentum=0.9, backtrack=1.5
)


def objective_value(net: nn.Module, objective: Objective, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return objective(net(x), y)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_backtracking_ends_above_the_start_and_plain_steps(
    momentum: float, quick_net: QuickNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 60))
    attack = replace(BACK, momentum=momentum, step_size=0.1)
    start = attack._first_iterate(x, torch.arange(len(x)), noise.derive_seed(0, 0))
    found = objective_value(quick_net, WrongConfidence(), attack(quick_net, x, y), y)
    assert (found >= objective_value(quick_net, WrongConfidence(), start, y)).all()
    plain = objective_value(
        quick_net, WrongConfidence(), replace(attack, backtrack=0.0)(quick_net, x, y), y
    )
    assert found.mean() >= plain.mean()
    more = objective_value(
        quick_net, WrongConfidence(), replace(attack, steps=40)(quick_net, x, y), y
    )
    assert (more >= found).all()


def test_backtracking_helps_with_too_large_steps(quick_net: QuickNet, test_images: Images) -> None:
    x, y = test_images.batch(slice(0, 100))
    long = PGD(Linf(0.1), steps=12, step_size=0.2, start="clean", objective=CE(), backtrack=2.0)
    back = objective_value(quick_net, CE(), long(quick_net, x, y), y)
    plain = objective_value(quick_net, CE(), replace(long, backtrack=0.0)(quick_net, x, y), y)
    assert back.mean() > plain.mean()


def test_steps_by_hand(quick_net: QuickNet, batch: tuple[Tensor, Tensor]) -> None:
    """The reference algorithm, image by image."""
    x, y = batch
    attack = PGD(
        Linf(0.1),
        steps=6,
        step_size=0.04,
        start="clean",
        objective=WrongConfidence(),
        momentum=0.9,
        backtrack=1.5,
    )
    found = attack(quick_net, x, y)
    for i in range(4):
        one, label = x[i : i + 1], y[i : i + 1]
        current, mean, length = one, torch.zeros_like(one), 0.04
        for _ in range(6):
            grad, value, _ = attack_model(quick_net).gradient(WrongConfidence(), current, label)
            mean = 0.9 * mean + 0.1 * grad.sign()
            low, high = (one - 0.1).clamp_min(0), (one + 0.1).clamp_max(1)
            proposal = (current + length * mean).clamp(low, high)
            if objective_value(quick_net, WrongConfidence(), proposal, label) >= value:
                current = proposal
            else:
                length /= 1.5
        assert torch.allclose(found[i : i + 1], current, atol=1e-6)


@pytest.mark.parametrize("ball", [Linf(0.5), L2(2.0)])
def test_the_first_step_with_momentum_is_a_tenth(ball: Ball) -> None:
    net, x = LinearNet(), centred_images(5)
    y = prediction(net(x))
    attack = PGD(
        ball, steps=1, step_size=0.02, start="clean", objective=UntargetedMargin(), momentum=0.9
    )
    assert ball.norm(attack(net, x, y) - x).tolist() == pytest.approx(5 * [0.002], rel=1e-6)
    plain = replace(attack, momentum=0.0)
    assert ball.norm(plain(net, x, y) - x).tolist() == pytest.approx(5 * [0.02], rel=1e-6)


def test_momentum_is_a_moving_average_of_directions() -> None:
    x = torch.full((1, 1, 1, 2), 0.5)
    state = initial_momentum(x, 0.1, None)
    for grad, mean in (([3.0, -4.0], [0.1, -0.1]), ([2.0, 1.0], [0.19, 0.01])):
        grad_tensor = torch.tensor(grad).view(1, 1, 1, 2)
        x_next, found = propose_step(Linf(1.0), x, state, grad_tensor, 0.9)
        assert found.flatten().tolist() == pytest.approx(mean)
        assert x_next.flatten().tolist() == pytest.approx([0.5 + 0.1 * m for m in mean])
        state = state._replace(mean=found)


def test_a_tie_is_kept_and_strict_shortens_the_next_step() -> None:
    x = torch.zeros(3, 1, 1, 1)
    value = torch.tensor([1.0, 1.0, 1.0])
    state, proposal = initial_momentum(x, 0.3, value), x + 1
    after = keep_or_undo_step(state, proposal, torch.tensor([0.5, 1.0, 2.0]), 1.5, strict=True)
    assert after.x_adv.flatten().tolist() == [0, 1, 1]
    assert after.length.tolist() == pytest.approx([0.2, 0.2, 0.3])
    assert after.value.tolist() == [1, 1, 2]
    after = keep_or_undo_step(state, proposal, torch.tensor([0.5, 1.0, 2.0]), 1.5, strict=False)
    assert after.x_adv.flatten().tolist() == [0, 1, 1]
    assert after.length.tolist() == pytest.approx([0.2, 0.3, 0.3])
    first = keep_or_undo_step(initial_momentum(x, 0.3, None), proposal, value, 1.5, strict=True)
    assert first.x_adv.all()


def test_backtrack_objective_decides_which_steps_are_undone(
    quick_net: QuickNet, test_images: Images
) -> None:
    """The first step is always kept, and no later one lowers the cross-entropy."""
    x, y = test_images.batch(slice(0, 60))
    attack = replace(BACK, start="clean", step_size=0.05, backtrack_objective=CE())
    first = replace(attack, steps=1, backtrack=0.0, backtrack_objective=None)(quick_net, x, y)
    assert torch.equal(replace(attack, steps=1)(quick_net, x, y), first)
    values = [
        objective_value(quick_net, CE(), replace(attack, steps=n)(quick_net, x, y), y)
        for n in (1, 5, 9)
    ]
    assert (values[1] >= values[0]).all()
    assert (values[2] >= values[1]).all()
    other = replace(attack, backtrack_objective=None)(quick_net, x, y)
    assert not torch.equal(attack(quick_net, x, y), other)


def test_restarts_are_ranked_by_the_backtrack_objective(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = replace(BACK, steps=4, backtrack_objective=CE(), start="random")
    few, more = attack(quick_net, x, y), replace(attack, restarts=3)(quick_net, x, y)
    assert (
        objective_value(quick_net, CE(), more, y) >= objective_value(quick_net, CE(), few, y) - 1e-6
    ).all()


@pytest.mark.parametrize("objective", [None, KL()], ids=repr)
@pytest.mark.parametrize("start", ["mixed", "ray_or_clean", "random"])
@pytest.mark.parametrize("ball", [Linf(0.1), L2(0.5)], ids=repr)
def test_does_not_depend_on_the_batch_and_stays_in_the_ball(
    ball: Ball, start: str, objective: Objective | None, quick_net: QuickNet, test_images: Images
) -> None:
    attack = replace(BACK, ball=ball, steps=5, start=start, backtrack_objective=objective)  # type: ignore[arg-type]
    net, x = LinearNet().eval(), centred_images(9)
    y, index = prediction(net(x)), torch.arange(40, 49)
    full = attack(net, x, y, index)
    assert torch.allclose(full, attack(net, x.flip(0), y.flip(0), index.flip(0)).flip(0))
    assert torch.allclose(full[4:5], attack(net, x[4:5], y[4:5], index[4:5]))
    assert torch.equal(full, attack(net, x, y, index))
    x, y = test_images.batch(slice(0, 30))
    x_adv = attack(quick_net, x, y)
    assert ball.norm(x_adv - x).max() <= ball.eps * (1 + 1e-6) + 1e-7
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: replace(BACK, keep="success"), "keep=max_objective only"),
        (lambda: PGD(Linf(0.1), momentum=0.5, keep="success"), "keep=max_objective only"),
        (lambda: PGD(Linf(0.1), backtrack_objective=CE()), "no effect without backtrack"),
        (lambda: PGD(Linf(0.1), backtrack=0.5), "must be above 1"),
        (lambda: PGD(Linf(0.1), momentum=1.0), "no image ever moves"),
        (lambda: PGD(L2(0.1), step_size=1e20), "at most 1e.06, since pixels"),
        (lambda: FrankWolfe(Linf(0.1), momentum=0.5), "use PGD"),
    ],
)
def test_invalid_fields_raise(construct: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        construct()
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------ starts


@pytest.mark.parametrize("ball", [Linf(0.3), L2(0.3)], ids=repr)
def test_random_starts_have_the_documented_distribution(ball: Ball) -> None:
    x = torch.full((3000, 1, 6, 6), 0.5)
    delta = ball.mixed_start(x, 0, torch.arange(3000), 4, 1 / 3, 1 / 3) - x
    size = Linf(1).norm(delta)
    clean = size == 0
    assert clean.float().mean().item() == pytest.approx(1 / 3, abs=0.03)
    sigma = 0.3 / (2 * log(36))
    radius = ball.norm(delta)[~clean] / 0.3
    ray_or_clean = ball.mixed_start(x, 0, torch.arange(3000), 4, 0, 1 / 2) - x
    moved = Linf(1).norm(ray_or_clean) > 0
    assert moved.float().mean().item() == pytest.approx(1 / 2, abs=0.03)
    rays = ball.norm(ray_or_clean)[moved] / 0.3
    assert rays.max() <= 1 + 1e-5
    assert rays.mean().item() == pytest.approx(1 / 2, abs=0.03)
    assert (rays < 0.1).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert radius.max() <= 1 + 1e-5
    if isinstance(ball, Linf):  # the largest of 36 normal pixels is near 2.2 sigma
        choice = noise.uniform(0, torch.arange(3000), noise.derive_seed(4, 2), (1,))[:, 0]
        small = delta[choice < 1 / 3]
        assert small.std().item() == pytest.approx(sigma, rel=0.02)


def test_starts_differ_by_stream_and_allow_a_zero_radius() -> None:
    x, index = torch.rand(4, 1, 1, 1), torch.arange(4)
    for ball in (Linf(0.0), L2(0.0)):
        for shares in ((1 / 3, 1 / 3), (0, 1 / 2)):
            assert torch.allclose(ball.mixed_start(x, 0, index, 0, *shares), x)
    wide = torch.full((50, 1, 4, 4), 0.5)
    for shares in ((1 / 3, 1 / 3), (0, 1 / 2)):
        start = partial(Linf(0.1).mixed_start, near=shares[0], far=shares[1])
        index, stream = torch.arange(50), torch.full((1,), 7, dtype=torch.int64)
        assert not torch.equal(start(wide, 0, index, 0), start(wide, 0, index, 1))
        assert torch.equal(start(wide, 0, index, stream), start(wide, 0, index, 7))
