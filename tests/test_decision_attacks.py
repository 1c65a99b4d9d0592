"""HopSkipJump and RayS: distances in closed form, budgets, three outcomes, independence."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from demur.attacks import (
    AcceptedError,
    Criterion,
    FalseRejection,
    HopSkipJump,
    Misclassified,
    RayS,
    Rejected,
    decision,
)
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.decision import DecisionAttack
from demur.errors import BadInput
from demur.output import as_output, prediction
from demur.rejectors import Con
from tests.linear import LinearNet, centred_images, distance
from tests.quick_net import QuickNet

ATTACKS: tuple[DecisionAttack, ...] = (
    HopSkipJump(L2(0.4), queries=70),
    HopSkipJump(Linf(0.1), queries=70),
    RayS(Linf(0.1), queries=70),
)
every_attack = pytest.mark.parametrize("attack", ATTACKS, ids=["hsj-l2", "hsj-linf", "rays"])


class Decisions(nn.Module):
    """A model that shows its decision alone and counts its queries by image."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.net, self.clean, self.counts = net, x, Counter[int]()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.flatten(1), self.clean.flatten(1)).argmin(1)
        self.counts.update(nearest.tolist())
        label = prediction(as_output(self.net(x.detach())))
        return one_hot(label, as_output(self.net(x[:1])).logits.shape[-1]).to(x)


@pytest.mark.parametrize(
    ("attack", "norm", "within"),
    [
        (HopSkipJump(L2(1e-3), queries=1500, any_distance=True), "L2", 1.05),
        pytest.param(
            HopSkipJump(Linf(1e-3), queries=1500, any_distance=True),
            "Linf",
            1.05,
            marks=pytest.mark.exhaustive,
        ),
        (RayS(Linf(1e-3), queries=400, any_distance=True), "Linf", 1.01),
    ],
)
def test_the_closest_success_of_a_linear_net_is_nearly_the_optimum(
    attack: DecisionAttack, norm: str, within: float
) -> None:
    net, x = LinearNet(), centred_images(4)
    y = prediction(net(x))
    x_adv = attack(net, x, y)
    ratio = attack.ball.norm(x_adv - x) / distance(net, x, y, norm)
    assert (prediction(net(x_adv)) != y).all()
    assert ratio.min() >= 1 - 1e-9
    assert ratio.max() < within


@pytest.mark.parametrize(
    ("norm", "kind"), [pytest.param("L2", L2, marks=pytest.mark.exhaustive), ("Linf", Linf)]
)
def test_success_in_a_ball_is_decided_by_the_known_distance(norm: str, kind: type[Ball]) -> None:
    net, x = LinearNet(), centred_images(8)
    y = prediction(net(x))
    known = distance(net, x, y, norm)
    ball = kind(float(known.median()))
    x_adv = HopSkipJump(ball, queries=1500)(net, x, y)
    broken = prediction(net(x_adv)) != y
    assert not broken[known > ball.eps * (1 + 1e-6)].any()
    assert broken[known < 0.95 * ball.eps].all()
    assert torch.equal(x_adv[~broken], x[~broken])  # unchanged without a success in the ball


@every_attack
@pytest.mark.parametrize("queries", [1, 17, 40])
def test_no_image_has_more_queries_than_its_budget(
    attack: DecisionAttack, queries: int, quick_net: QuickNet
) -> None:
    x = torch.eye(64)[:5].view(5, 1, 8, 8)  # far from each other, so that each query has an owner
    y = prediction(quick_net(x))
    counted = Decisions(quick_net, x)
    attack = replace(attack, queries=queries, ball=type(attack.ball)(0.01))
    attack.perturb(counted, x, y, torch.arange(5))
    assert sum(counted.counts.values()) <= 5 * queries
    alone = Decisions(quick_net, x[:1])
    attack.perturb(alone, x[:1], y[:1], torch.arange(1))
    assert 0 < alone.counts[0] <= queries


@every_attack
def test_the_budget_is_spent_where_the_ball_holds_no_success(
    attack: DecisionAttack,
    batch: tuple[Tensor, Tensor],
    quick_net: QuickNet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = (part[:3] for part in batch)
    y = prediction(quick_net(x))
    monkeypatch.setattr(decision, "LEAST_QUERIES", 30)  # so that there are three restarts
    for restarts in (1, 3):
        counted = Decisions(quick_net, x)
        own = replace(attack, restarts=restarts, ball=type(attack.ball)(1e-4))
        own.perturb(counted, x, y, torch.arange(3))
        assert sum(counted.counts.values()) == 3 * attack.queries


@every_attack
@pytest.mark.parametrize(
    "criterion",
    [Misclassified(), AcceptedError(Con(), 0.6), FalseRejection(Con(), 0.9), Rejected(Con(), 0.9)],
    ids=lambda one: type(one).__name__,
)
def test_every_outcome_can_be_sought(
    attack: DecisionAttack, criterion: Criterion, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (part[:14] for part in batch)
    attack = replace(
        attack, criterion=criterion, queries=100, ball=type(attack.ball)(2 * attack.ball.eps)
    )
    x_adv = attack(quick_net, x, y)
    before, after = criterion(quick_net(x), y), criterion(quick_net(x_adv), y)
    assert (before <= after).all()
    assert after.sum() > before.sum()
    assert attack.ball.contains(x, x_adv).all()


@every_attack
def test_images_do_not_depend_on_their_batch(attack: DecisionAttack) -> None:
    net, x, index = LinearNet(), centred_images(5), torch.arange(40, 45)
    y = prediction(net(x))
    attack = replace(attack, any_distance=True, queries=40)
    full = attack(net, x, y, index)
    assert torch.equal(full, attack(net, x, y, index))
    order = torch.tensor([3, 4, 1])
    assert torch.allclose(full[order], attack(net, x[order], y[order], index[order]), atol=1e-9)
    assert not torch.equal(full, replace(attack, seed=1)(net, x, y, index))


@every_attack
def test_only_decisions_are_read(
    attack: DecisionAttack, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (part[:4] for part in batch)
    assert torch.equal(attack(quick_net, x, y), attack(Decisions(quick_net, x), x, y))


@every_attack
def test_a_clean_success_needs_one_query(
    attack: DecisionAttack, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x = batch[0][:4]
    counted, wrong = Decisions(quick_net, x), (prediction(quick_net(x)) + 1) % 10
    assert torch.equal(attack.perturb(counted, x, wrong, torch.arange(4)), x)
    assert sum(counted.counts.values()) == 4


def test_another_ball_is_refused() -> None:
    with pytest.raises(BadInput, match=r"RayS.ball must be Linf, not L2"):
        RayS(L2(0.5))
