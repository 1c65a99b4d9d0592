"""Auto-PGD: its checkpoints, its memory, and its strength beside a peer's."""

import warnings

import pytest
import torch
from torch import Tensor

from demur.attacks import APGD, CE, DLR, PGD, LogitMargin, MultiTarget, TargetedDLR
from demur.attacks.apgd import APGDState, _checks
from demur.attacks.batch import BLOCK
from demur.balls import L2, Ball, Linf
from demur.data import Images
from demur.nets import RejectingNet
from demur.output import prediction
from tests.approximate_model import Rough
from tests.linear import LinearNet, centred_images, distance


def test_checks_come_closer_and_closer() -> None:
    assert sorted(_checks(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert sorted(_checks(1)) == [1]
    assert max(_checks(7)) <= 7


def climb(**parts: float) -> APGDState:
    usual = {"x_adv": 0.0, "before": 0.0, "grad": 0.0, "value": 0.0, "best": 9.0, "best_grad": 9.0,
             "best_value": 1.0, "length": 8.0, "rises": 10.0, "best_at_check": 0.0}  # fmt: skip
    tensors = {name: torch.tensor([value]) for name, value in (usual | parts).items()}
    return APGDState(**tensors, reduced=torch.tensor([False]))


@pytest.mark.parametrize(
    ("parts", "halves"),
    [
        ({"rises": 8.0}, False),  # more than three quarters of ten
        ({"rises": 7.0}, True),
        ({"rises": 10.0, "best_at_check": 1.0}, True),  # the best did not move since
    ],
)
def test_who_rises_too_seldom_goes_back_with_half_the_step(
    parts: dict[str, float], halves: bool
) -> None:
    after = APGD(Linf(0.1))._checked(climb(**parts), 10)
    assert after.length.item() == (4 if halves else 8)
    assert after.x_adv.item() == (9 if halves else 0)
    assert after.grad.item() == (9 if halves else 0)
    assert after.reduced.item() is halves
    assert after.rises.item() == 0
    assert after.best_at_check.item() == 1


@pytest.mark.parametrize("ball", [Linf, L2])
@pytest.mark.parametrize("objective", [CE(), LogitMargin(), DLR()], ids=repr)
def test_a_linear_net_breaks_just_beyond_its_distance(
    ball: type[Ball], objective: CE | LogitMargin | DLR
) -> None:
    net, x = LinearNet(), centred_images(3)
    y = prediction(net(x))
    least = distance(net, x, y, ball.__name__)
    for share, expected in ((0.98, False), (1.02, True)):
        for place, far in enumerate(least):
            attack = APGD(ball(float(share * far)), steps=60, objective=objective)
            chosen = slice(place, place + 1)
            broken = prediction(net(attack(net, x[chosen], y[chosen]))) != y[chosen]
            assert bool(broken) is expected


def test_broken_images_are_returned_broken_and_others_with_their_best(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = APGD(Linf(0.1), steps=20, objective=LogitMargin())
    x_adv = attack(tiny_net, x, y)
    longer = APGD(Linf(0.1), steps=20, objective=LogitMargin(), keep="max_objective")(
        tiny_net, x, y
    )
    margin, best = (LogitMargin()(tiny_net(images), y) for images in (x_adv, longer))
    assert ((margin > 0) == (prediction(tiny_net(x_adv)) != y)).all()
    assert (margin > 0).any()
    assert (best >= margin - 1e-4).all(), "without leaving early every goal gets further"
    unbroken = margin <= 0
    assert torch.allclose(best[unbroken], margin[unbroken], atol=1e-3)


def test_it_is_at_least_as_strong_as_pgd_of_as_many_steps(
    tiny_net: RejectingNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 100))
    right = [
        (prediction(tiny_net(attack(tiny_net, x, y))) == y).sum()
        for attack in (APGD(Linf(0.15), steps=30), PGD(Linf(0.15), steps=30, keep="success"))
    ]
    assert right[0] <= right[1] + 1


@pytest.mark.parametrize(("norm", "ball"), [("Linf", Linf(0.12)), ("L2", L2(0.8))])
@pytest.mark.parametrize(("loss", "objective"), [("ce", CE()), ("dlr", DLR())])
def test_it_is_as_strong_as_a_peers(
    tiny_net: RejectingNet,
    test_images: Images,
    norm: str,
    ball: Ball,
    loss: str,
    objective: CE | DLR,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks
    x, y = test_images.batch(slice(0, 60))
    model = tiny_net.classifier().eval()
    lead = []  # how many more are left right by ours, for one start each
    for seed in range(4):
        peer = torchattacks.APGD(
            model, norm=norm, eps=ball.eps, steps=40, n_restarts=1, loss=loss, seed=seed
        )
        ours = APGD(ball, steps=40, objective=objective, seed=seed)(tiny_net, x, y)
        right = [int((prediction(tiny_net(images)) == y).sum()) for images in (ours, peer(x, y))]
        lead.append(right[0] - right[1])
    assert sum(lead) / len(lead) <= 2.5, "one start leaves 1.3 more or fewer by chance"


def test_targets_by_apgd_break_what_dlr_alone_breaks(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    alone = APGD(Linf(0.12), steps=20, objective=DLR())
    each = MultiTarget(APGD(Linf(0.12), steps=20, objective=TargetedDLR()), keep="success")
    broken = [(prediction(tiny_net(a(tiny_net, x, y))) != y).sum() for a in (alone, each)]
    assert broken[1] >= broken[0]


def test_a_rough_model_is_asked_once_in_a_block_and_only_about_claims() -> None:
    net, x = LinearNet(), centred_images(12)
    y = prediction(net(x))
    model = Rough(net, 0.0)
    tight = Linf(0.5 * float(distance(net, x, y, "Linf").min()))
    APGD(tight, steps=3 * BLOCK).perturb(model, x, y, y)
    assert model.asked == 0, "nothing was claimed"
    wide = Linf(2 * float(distance(net, x, y, "Linf").max()))
    x_adv = APGD(wide, steps=3 * BLOCK).perturb(model, x, y, y)
    assert (prediction(net(x_adv)) != y).all()
    assert model.asked == len(x), "each claim is true, and its image leaves"


def test_what_it_calls_broken_in_rough_arithmetic_is(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = APGD(Linf(0.15), steps=25, objective=DLR())
    sure = prediction(tiny_net(attack(tiny_net, x, y))) != y
    x_adv = attack.perturb(Rough(tiny_net, 0.5), x, y, torch.arange(len(x)))
    assert Linf(0).size(x_adv - x).max() <= 0.15 + 1e-6
    assert (prediction(tiny_net(x_adv)) != y).sum() >= sure.sum() - 2
