"""When PGD succeeds and what it returns, on linear nets and on a trained net."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from demur import noise
from demur.attacks import CE, PGD, AcceptedError, Objective, PlusLogScore, UntargetedMargin
from demur.attacks.attack_model import attack_model
from demur.attacks.balls import L2, Ball, Linf
from demur.data import Images
from demur.nets import RejectingNet
from demur.output import prediction
from demur.rejectors import RCon
from demur.spec import show
from tests.linear import LinearNet, centred_images, distance
from tests.quick_net import QuickNet


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize("objective", [CE(), UntargetedMargin()], ids=show)
@pytest.mark.parametrize("keep", ["max_objective", "success"])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_succeeds_on_a_linear_net_exactly_where_eps_exceeds_the_distance(
    kind: type[Ball], objective: Objective, keep: Literal["max_objective", "success"], seed: int
) -> None:
    net, x = LinearNet(seed, classes=2), centred_images(32, seed)
    y = prediction(net(x))
    reach = distance(net, x, y, kind.__name__)
    for eps in reach.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist():
        if eps > 0.35:
            continue  # beyond this the pixel range cuts the ball and the closed form is wrong
        attack = PGD(kind(eps), steps=30, objective=objective, keep=keep)
        success = prediction(net(attack(net, x, y))) != y
        assert success[1.05 * reach <= eps].all()
        assert not success[0.95 * reach >= eps].any()


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_never_succeeds_below_the_distance_of_a_linear_net(seed: int) -> None:
    net, x = LinearNet(seed), centred_images(16, seed)
    y = prediction(net(x))
    for ball in (Linf, L2):
        eps = 0.99 * float(distance(net, x, y, ball.__name__).min())
        for attack in (PGD(ball(eps)), PGD(ball(eps), restarts=3, keep="success")):
            assert torch.equal(prediction(net(attack(net, x, y))), y)


def test_a_larger_ball_gives_at_least_as_many_successes(
    quick_net: QuickNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 100))
    right = []
    for eps in (0.0, 0.05, 0.15, 0.5, 1.0):
        attack = PGD(Linf(eps), steps=20, keep="success")
        right.append(int((prediction(quick_net(attack(quick_net, x, y))) == y).sum()))
    assert right == sorted(right, reverse=True)
    assert right[0] > 80
    assert right[-1] == 0


def test_max_objective_returns_the_last_iterate_with_the_largest_objective(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = PGD(Linf(0.1), steps=3, restarts=3)
    index = torch.arange(len(x))
    last_iterates = []
    for restart in range(3):
        x_adv = Linf(0.1).start(x, 0, index, noise.derive_seed(0, restart))
        for _ in range(3):
            x_adv = Linf(0.1).step(
                x, x_adv, attack_model(quick_net).gradient(CE(), x_adv, y).grad, 0.1 / 4
            )
        last_iterates.append(x_adv)
    values = torch.stack([CE()(quick_net(one), y) for one in last_iterates])
    returned = CE()(quick_net(attack(quick_net, x, y)), y)
    assert torch.allclose(returned, values.amax(0), atol=1e-6)


def test_success_returns_every_iterate_that_satisfies_the_criterion(
    tiny_net: RejectingNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 100))
    rule = RCon().rule(0.5)
    attack = PGD(
        Linf(0.15), steps=10, objective=CE(), keep="success", criterion=AcceptedError(RCon(), 0.5)
    )
    out = tiny_net(attack(tiny_net, x, y))
    success = (prediction(out) != y) & rule.accepted(out)
    largest = tiny_net(replace(attack, keep="max_objective")(tiny_net, x, y))
    success_at_the_end = (prediction(largest) != y) & rule.accepted(largest)
    assert success.sum() >= success_at_the_end.sum()
    assert success[success_at_the_end].all()  # the last iterate is one of the iterates


def test_a_clean_image_that_is_a_success_is_returned_unchanged(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    y = (prediction(quick_net(x)) + 1) % 10
    assert torch.equal(PGD(Linf(0.1), keep="success")(quick_net, x, y), x)


def test_adaptive_attack_finds_more_accepted_errors_than_noise(
    tiny_net: RejectingNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 150))
    criterion = AcceptedError(RCon(), 0.5)
    adaptive = PGD(
        Linf(0.15),
        steps=20,
        objective=PlusLogScore(RCon(), eta=0.1),
        keep="success",
        criterion=criterion,
    )
    random = Linf(0.15).start(x, 0, torch.arange(len(x)), 0)
    successes = int(criterion(tiny_net(adaptive(tiny_net, x, y)), y).sum())
    assert successes > int(criterion(tiny_net(random), y).sum()) + 5
