"""Auto-PGD: checkpoints, step sizes, verification, and strength against a peer."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from demur.attacks import APGD, CE, DLR, PGD, MultiTarget, Objective, TargetedDLR, UntargetedMargin
from demur.attacks.apgd import APGDState, _checkpoint_gaps
from demur.attacks.attack_model import AttackModel
from demur.attacks.balls import L2, Ball, Linf
from demur.data import Images
from demur.output import Output, prediction
from tests.approximate_model import ApproximateModel
from tests.linear import LinearNet, centred_images, distance
from tests.quick_net import QuickNet


def test_gaps_between_checkpoints_shrink() -> None:
    assert sorted(_checkpoint_gaps(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert sorted(_checkpoint_gaps(1)) == [1]
    assert max(_checkpoint_gaps(7)) <= 7


def make_state(**parts: float) -> APGDState:
    defaults = {
        "x_adv": 0.0, "previous": 0.0, "grad": 0.0, "value": 0.0, "best_x": 9.0, "best_grad": 9.0,
        "best_value": 1.0, "step_size": 8.0, "rises": 10.0, "best_at_checkpoint": 0.0,
        "changed": 0.0,
    }  # fmt: skip
    tensors = {name: torch.tensor([value]) for name, value in (defaults | parts).items()}
    no = torch.tensor([False])
    return APGDState(**tensors, candidate=no, halved=no)


@pytest.mark.parametrize(
    ("parts", "halves"),
    [
        ({"rises": 8.0}, False),  # more than three quarters of ten
        ({"rises": 7.0}, True),
        ({"rises": 10.0, "best_at_checkpoint": 1.0}, True),  # the best value did not improve
    ],
)
def test_slow_ascent_returns_to_the_best_iterate_with_half_the_step_size(
    parts: dict[str, float], halves: bool
) -> None:
    after = APGD(Linf(0.1))._checkpoint(make_state(**parts), 10)
    assert after.step_size.item() == (4 if halves else 8)
    assert after.x_adv.item() == (9 if halves else 0)
    assert after.grad.item() == (9 if halves else 0)
    assert after.halved.item() is halves
    assert after.rises.item() == 0
    assert after.best_at_checkpoint.item() == 1


@dataclass(frozen=True)
class NearMinusTenth(Objective):
    """Largest where the second logit is -0.01, before the boundary at 0."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return -(out.logits[:, 1] + 0.01).square()


def test_a_success_at_a_checkpoint_is_returned_and_not_the_best_iterate() -> None:
    def model(x: Tensor) -> Tensor:
        shift = (x - 0.5).flatten(1).sum(1)
        return torch.stack([torch.zeros_like(shift), shift], 1)

    x, y = torch.full((8, 1, 1, 1), 0.5), torch.zeros(8, dtype=torch.long)
    x_adv = APGD(Linf(0.1), steps=1, objective=NearMinusTenth())(model, x, y)
    assert (model(x_adv).argmax(1) == 1).all()


@pytest.mark.parametrize("ball", [Linf, L2])
@pytest.mark.parametrize("objective", [CE(), UntargetedMargin(), DLR()], ids=repr)
def test_succeeds_on_a_linear_net_just_beyond_its_distance(
    ball: type[Ball], objective: CE | UntargetedMargin | DLR
) -> None:
    net, x = LinearNet(), centred_images(3)
    y = prediction(net(x))
    distances = distance(net, x, y, ball.__name__)
    for factor, expected in ((0.98, False), (1.02, True)):
        for row, far in enumerate(distances):
            attack = APGD(ball(float(factor * far)), steps=60, objective=objective)
            chosen = slice(row, row + 1)
            success = prediction(net(attack(net, x[chosen], y[chosen]))) != y[chosen]
            assert bool(success) is expected


def test_returns_a_success_or_the_iterate_with_the_largest_objective(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = APGD(Linf(0.1), steps=20, objective=UntargetedMargin())
    x_adv = attack(quick_net, x, y)
    longer = APGD(Linf(0.1), steps=20, objective=UntargetedMargin(), keep="max_objective")(
        quick_net, x, y
    )
    margin, best = (UntargetedMargin()(quick_net(images), y) for images in (x_adv, longer))
    assert ((margin > 0) == (prediction(quick_net(x_adv)) != y)).all()
    assert (margin > 0).any()
    assert (best >= margin - 1e-4).all(), "images that do not leave early reach a larger objective"
    robust = margin <= 0
    assert torch.allclose(best[robust], margin[robust], atol=1e-3)


def test_is_at_least_as_strong_as_pgd_with_as_many_steps(
    quick_net: QuickNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 100))
    right = [
        (prediction(quick_net(attack(quick_net, x, y))) == y).sum()
        for attack in (APGD(Linf(0.15), steps=30), PGD(Linf(0.15), steps=30, keep="success"))
    ]
    assert right[0] <= right[1] + 1


@pytest.mark.parametrize(
    ("norm", "ball", "loss", "objective"),
    [("Linf", Linf(0.12), "ce", CE()), ("L2", L2(0.8), "dlr", DLR())],
)
def test_is_as_strong_as_torchattacks(
    quick_net: QuickNet, test_images: Images, norm: str, ball: Ball, loss: str, objective: CE | DLR
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks
    x, y = test_images.batch(slice(0, 40))
    model = quick_net.classifier().eval()
    differences = []  # robust images after ours minus after the peer, one start each
    for seed in range(3):
        peer = torchattacks.APGD(
            model, norm=norm, eps=ball.eps, steps=20, n_restarts=1, loss=loss, seed=seed
        )
        ours = APGD(ball, steps=20, objective=objective, seed=seed)(quick_net, x, y)
        right = [int((prediction(quick_net(images)) == y).sum()) for images in (ours, peer(x, y))]
        differences.append(right[0] - right[1])
    assert sum(differences) / len(differences) <= 2.5, "the standard deviation over starts is 1.3"


def test_targeted_apgd_succeeds_at_least_as_often_as_dlr(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (part[:12] for part in batch)
    untargeted = APGD(Linf(0.12), steps=20, objective=DLR())
    targeted = MultiTarget(APGD(Linf(0.12), steps=20, objective=TargetedDLR()), keep="success")
    successes = [
        (prediction(quick_net(a(quick_net, x, y))) != y).sum() for a in (untargeted, targeted)
    ]
    assert successes[1] >= successes[0]


def test_an_approximate_model_is_verified_at_candidates_only() -> None:
    net, x = LinearNet(), centred_images(12)
    y = prediction(net(x))
    model = ApproximateModel(net, 0.0)
    tight = Linf(0.5 * float(distance(net, x, y, "Linf").min()))
    APGD(tight, steps=3 * AttackModel.verify_every).perturb(model, x, y, y)
    assert model.exact_passes == 0, "there was no candidate"
    wide = Linf(2 * float(distance(net, x, y, "Linf").max()))
    x_adv = APGD(wide, steps=3 * AttackModel.verify_every).perturb(model, x, y, y)
    assert (prediction(net(x_adv)) != y).all()
    assert model.exact_passes == len(x), "each candidate is confirmed, and its image leaves"


def test_successes_of_an_approximate_model_are_real(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = APGD(Linf(0.15), steps=25, objective=DLR())
    exact = prediction(quick_net(attack(quick_net, x, y))) != y
    x_adv = attack.perturb(ApproximateModel(quick_net, 0.5), x, y, torch.arange(len(x)))
    assert Linf(0).norm(x_adv - x).max() <= 0.15 + 1e-6
    assert (prediction(quick_net(x_adv)) != y).sum() >= exact.sum() - 2
