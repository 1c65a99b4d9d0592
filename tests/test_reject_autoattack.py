"""Attacks on models that reject: margins, nets with known solutions, and ensembles."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

from demur.attacks import (
    APGD,
    PGD,
    AcceptedError,
    Attack,
    ForceRejectionEnsemble,
    MarginProduct,
    MaxMinMargin,
    MinMargin,
    MultiTarget,
    OrthogonalAPGD,
    RejectAutoAttackEnsemble,
    Rejected,
    RejectionObjective,
    SingleMargin,
    Square,
)
from demur.attacks.attack_model import attack_model
from demur.attacks.autoattack import Chain
from demur.attacks.balls import L2, Linf
from demur.attacks.margins import initial_state, orthogonal, solve_game
from demur.attacks.objectives.classification import AttackStart
from demur.attacks.wrappers import ModelWithScore
from demur.data import Images
from demur.errors import BadInput
from demur.nets import RejectingNet
from demur.output import Output, as_output, prediction
from demur.rejectors import (
    Con,
    Coupled,
    Energy,
    Entropy,
    MaxLogit,
    ModelScore,
    RCon,
    Rectifier,
    SoftmaxMargin,
)
from demur.rejectors.rule import Score
from tests.linear import SHAPE, LinearNet, centred_images, distance

SCORES: list[Score] = [
    Con(), Con(0.5), RCon(), RCon(2.0), Rectifier(), Energy(), Entropy(), MaxLogit(2.0),
    SoftmaxMargin(), ModelScore(),
]  # fmt: skip
RULES = [
    AcceptedError(Con(), 0.4), AcceptedError(RCon(), 0.3), AcceptedError(Energy(), 2.0),
    AcceptedError(Rectifier(), 0.5), AcceptedError(Coupled(gate_threshold=0.4), 0.2),
]  # fmt: skip


def random_output(seed: int, scale: float = 2.0) -> tuple[Output, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(60, 5, generator=g, dtype=torch.float64)
    aux = torch.randn(60, 1, generator=g, dtype=torch.float64)
    return Output(logits, logits[:, :0], aux), torch.randint(0, 5, (60,), generator=g)


class TestMargins:
    @pytest.mark.parametrize("score", SCORES, ids=str)
    @given(seed=st.integers(0, 10**6))
    def test_accept_margin_has_the_sign_of_score_minus_threshold(
        self, score: Score, seed: int
    ) -> None:
        out, _ = random_output(seed)
        value = score(out)
        t = float(value.median()) + 1e-9
        margin = score.accept_margin(out, t, prediction(out))
        assert torch.equal(margin > 0, value > t)

    def test_accept_margin_of_another_class_by_hand(self) -> None:
        out = Output(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 0), torch.tensor([[0.0]]))
        p = float(out.logits.softmax(-1)[0, 1])
        label = torch.tensor([1])
        assert float(Con().accept_margin(out, 0.5, label)) == pytest.approx(np.log(p / (1 - p)))
        half = p / 2  # A is one half
        assert float(RCon().accept_margin(out, 0.2, label)) == pytest.approx(
            np.log(half / (1 - half)) - np.log(0.25), rel=1e-5
        )
        assert float(MaxLogit().accept_margin(out, 1.0, label)) == -1.0

    @pytest.mark.parametrize("rule", RULES, ids=str)
    @given(seed=st.integers(0, 10**6))
    def test_min_margin_is_positive_exactly_at_accepted_errors(
        self, rule: AcceptedError, seed: int
    ) -> None:
        out, y = random_output(seed)
        g = torch.Generator().manual_seed(seed)
        count = 1 + len(rule.accept_rule.pairs)
        slopes = torch.rand(60, count, generator=g, dtype=torch.float64) + 0.1
        any_target = torch.full_like(y, -1)
        value = MinMargin(rule)(out, y, any_target, slopes)
        assert torch.equal(value > 0, rule(out, y))
        single = [SingleMargin(rule, i)(out, y, any_target, slopes) for i in range(count)]
        assert torch.equal(torch.stack(single).amin(0), value)

    @given(seed=st.integers(0, 10**6))
    def test_reaching_the_target_is_an_accepted_error(self, seed: int) -> None:
        out, y = random_output(seed)
        target = (y + 1) % 5
        for rule in RULES:
            slopes = torch.ones(60, 1 + len(rule.accept_rule.pairs), dtype=torch.float64)
            reached = MinMargin(rule)(out, y, target, slopes) > 0
            success, at_target = rule(out, y), prediction(out) == target
            assert success[reached].all()
            assert torch.equal(reached[at_target], success[at_target])

    @given(seed=st.integers(0, 10**6))
    def test_rejection_objective_is_positive_exactly_at_rejected_inputs(self, seed: int) -> None:
        out, y = random_output(seed)
        for rejector in (Con(), RCon(), Coupled(gate_threshold=0.4)):
            rule = Rejected(rejector, 0.35)
            assert torch.equal(RejectionObjective(rule)(out, y) > 0, rule(out, y))

    def test_product_by_hand(self) -> None:
        out = Output(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 0), torch.zeros(1, 0))
        y, target = torch.tensor([0]), torch.tensor([-1])
        p = float(out.logits.softmax(-1)[0, 1])
        slopes = torch.tensor([[3.0, 1.5]])  # one unit of accept margin is worth two of a logit
        chance = 1 / (1 + np.exp(-2 * (np.log(p / (1 - p)) - np.log(0.7 / 0.3))))
        assert float(
            MarginProduct(AcceptedError(Con(), 0.7))(out, y, target, slopes)
        ) == pytest.approx(np.log(p) + np.log(chance), rel=1e-5)

    def test_slopes_of_a_linear_net_are_the_norms_of_its_weights(self) -> None:
        net, x = LinearNet(), centred_images(6)
        y = torch.tensor([0, 1, 2, 3, 0, 1])
        rule = AcceptedError(MaxLogit(), 1.0)
        target = (y + 1) % 4
        _, slopes = MinMargin(rule).prepare(AttackStart(attack_model(net), x, x, y, target))
        lead = (net.weight[target] - net.weight[y]).norm(dim=1)
        assert torch.allclose(slopes[:, 0], lead)
        assert torch.allclose(slopes[:, 1], net.weight[target].norm(dim=1))

    def test_a_score_without_a_gradient_has_slope_one(self) -> None:
        net = ModelWithScore(LinearNet(), lambda x: x.detach().flatten(1).sum(1))
        x, y = centred_images(4), torch.zeros(4, dtype=torch.long)
        _, slopes = MinMargin(AcceptedError(ModelScore(), 1.0)).prepare(
            AttackStart(attack_model(net), x, x, y, None)
        )
        assert torch.equal(slopes[:, 1], torch.ones(4, dtype=torch.float64))


class TestMaxMinGame:
    @pytest.mark.parametrize("margins", [2, 3])
    @settings(max_examples=20)
    @given(seed=st.integers(0, 10**6))
    def test_the_solution_is_close_to_that_of_a_linear_program(
        self, margins: int, seed: int
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        grads = torch.randn(1, margins, 25, generator=g, dtype=torch.float64)
        values = 0.3 * torch.randn(1, margins, generator=g, dtype=torch.float64)
        x, ball = centred_images(1, seed), Linf(0.1)
        now = ball.start(x, 0, torch.zeros(1, dtype=torch.long), seed)
        found, weights = solve_game(
            ball, x, replace(initial_state(now, margins), values=values, grads=grads)
        )
        assert torch.allclose(weights.sum(1), torch.ones(1, dtype=torch.float64))
        assert ball.norm(found - x) <= ball.eps + 1e-9
        reached = values + (grads * (found - now).flatten(1)[:, None]).sum(2)
        rows = np.hstack([-grads[0].numpy(), np.ones((margins, 1))])
        shift = (grads[0] @ now.flatten()).numpy()
        box = [(v - 0.1, v + 0.1) for v in x.flatten().tolist()] + [(None, None)]
        best = linprog(np.append(np.zeros(25), -1), rows, values[0].numpy() - shift, bounds=box)
        span = 0.1 * float(grads.abs().sum(2).mean())
        assert -best.fun - 0.15 * span <= float(reached.amin()) <= -best.fun + 1e-9


class TestOrthogonal:
    @given(st.integers(0, 10**6))
    def test_is_orthogonal_to_the_other_gradients(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        grads = torch.randn(7, 3, 16, generator=g, dtype=torch.float64)
        chosen = torch.randint(0, 3, (7,), generator=g)
        found = orthogonal(grads, chosen)
        for index in range(3):
            along = (found * grads[:, index]).sum(1)
            assert (along[chosen == index] > 0).all()
            assert torch.allclose(along[chosen != index], torch.zeros(1, dtype=torch.float64))

    def test_parallel_gradients_stay_unchanged(self) -> None:
        grad = torch.randn(3, 4)
        found = orthogonal(torch.stack([grad, 2 * grad], 1), torch.tensor([0, 1, 0]))
        assert torch.allclose(found, torch.stack([grad[0], 2 * grad[1], grad[2]]))

    def test_needs_min_margin(self) -> None:
        with pytest.raises(BadInput, match="objective=MinMargin"):
            OrthogonalAPGD(Linf(0.1))


def best_margin(net: LinearNet, x: Tensor, y: int, t: float, eps: float) -> float:
    """Return the largest m such that some image of the ball is wrong by m and accepted by m.

    For a linear net with the logit of A as score this is a linear program per wrong class.
    """
    weight: NDArray[np.float64] = net.weight.detach().numpy()
    aux: NDArray[np.float64] = net.aux.detach().numpy()[0]
    best, flat = -np.inf, x.flatten().numpy()
    box = [(max(0.0, v - eps), min(1.0, v + eps)) for v in flat] + [(None, None)]
    for label in set(range(len(weight))) - {y}:
        rows = np.array([np.append(weight[y] - weight[label], 1), np.append(-aux, 1)])
        found = linprog(np.append(np.zeros(len(flat)), -1), rows, [0.0, -t], bounds=box)
        best = max(best, -found.fun)
    return best


def best_margins(net: LinearNet, x: Tensor, y: Tensor, t: float, eps: float) -> NDArray[np.float64]:
    """Return `best_margin` for each image."""
    pairs = zip(x, y.tolist(), strict=True)
    return np.array([best_margin(net, image, label, t, eps) for image, label in pairs])


def median_threshold(
    net: LinearNet, x: Tensor, y: Tensor, eps: float
) -> tuple[float, NDArray[np.float64]]:
    """Return a threshold at which half of the images can be accepted errors, and their margins."""
    low, high = (float(end) for end in net(x).aux.detach().aminmax())
    low, high = low - 10, high + 10
    for _ in range(12):
        level = (low + high) / 2
        margins = best_margins(net, x, y, level, eps)
        low, high = (level, high) if np.median(margins) > 0 else (low, level)
    return level, margins


def with_steps(chain: Chain, steps: int) -> Chain:
    """The chain with fewer steps than by default, so that it has to be better."""

    def shortened(attack: Attack) -> Attack:
        if isinstance(attack, MultiTarget):
            return replace(attack, attack=shortened(attack.attack))
        return replace(attack, steps=steps)  # type: ignore[call-arg]

    return replace(chain, attacks=tuple(map(shortened, chain.attacks)))


class TestKnownSolutions:
    """Linear nets whose reachable accepted errors are known."""

    def test_finds_exactly_the_reachable_accepted_errors(self) -> None:
        net, x = LinearNet(0), centred_images(16, 0)
        y = prediction(net(x))
        eps = 1.5 * float(distance(net, x, y, "Linf").max())
        level, margins = median_threshold(net, x, y, eps)
        rule = AcceptedError(Rectifier(), float(torch.tensor(level, dtype=torch.float64).sigmoid()))
        attack = with_steps(RejectAutoAttackEnsemble(Linf(eps), rule, version="fast").chain(), 20)
        success = rule(net(attack(net, x, y)), y).numpy()
        assert success[margins > 0.01].all()
        assert not success[margins < -1e-6].any()
        assert 3 < (margins > 0.01).sum() < 13

    def test_attacks_images_that_are_misclassified_but_rejected(self) -> None:
        """AutoAttack skips these images, because they are misclassified from the start."""
        net, x = LinearNet(1), centred_images(24, 1)
        y = (prediction(net(x)) + 1) % 4
        level = float(net(x).aux.max()) + 0.05
        rule = AcceptedError(Rectifier(), float(torch.tensor(level, dtype=torch.float64).sigmoid()))
        assert not rule(net(x), y).any()
        attack = with_steps(RejectAutoAttackEnsemble(Linf(0.05), rule, version="fast").chain(), 30)
        found = attack(net, x, y)
        reached = best_margins(net, x, y, level, 0.05) > 0.01
        assert rule(net(found), y).numpy()[reached].all()
        assert reached.sum() > 12

    def test_finds_accepted_errors_of_two_coupled_scores(self) -> None:
        """The gradients of the gate and of the second score conflict."""
        net, x = LinearNet(2), centred_images(16, 2)
        y = prediction(net(x))
        rule = AcceptedError(Coupled(gate=Con(), gate_threshold=0.5, score=Rectifier()), 0.45)
        attack = RejectAutoAttackEnsemble(Linf(0.25), rule, version="fast")
        parts = [
            PGD(Linf(0.25), steps=100, keep="success", criterion=rule, objective=objective)
            for objective in (MarginProduct(rule), MinMargin(rule))
        ]
        success = rule(net(attack(net, x, y)), y)
        for part in parts:
            assert success[rule(net(part(net, x, y)), y)].all()
        assert success.any()


class TestEnsembles:
    def test_fast_is_a_prefix_of_standard(self) -> None:
        rule = AcceptedError(RCon(), 0.6)
        standard = RejectAutoAttackEnsemble(Linf(0.15), rule).members()
        fast = RejectAutoAttackEnsemble(Linf(0.15), rule, version="fast").members()
        assert list(fast.items()) == list(standard.items())[: len(fast)]
        assert list(fast) == ["product", "balanced", "product-t"]
        assert list(standard)[len(fast) :] == ["closest", "orthogonal", "balanced-t", "square"]

    def test_is_stronger_than_its_members_and_returns_the_best_ranked_example(
        self, tiny_net: RejectingNet, test_images: Images
    ) -> None:
        x, y = test_images.batch(slice(0, 30))
        rule = AcceptedError(RCon(), 0.6)
        chain = RejectAutoAttackEnsemble(Linf(0.15), rule, version="fast").chain()
        short = Chain(
            tuple(
                replace(member, steps=10)
                for member in chain.attacks[:3]
                if isinstance(member, APGD | MaxMinMargin)
            ),
            criterion=rule, rank_by=MinMargin(rule),
        )  # fmt: skip
        x_adv = short(tiny_net, x, y)
        success = rule(tiny_net(x_adv), y)
        first = Chain(short.attacks[:1], criterion=rule)(tiny_net, x, y)
        assert success[rule(tiny_net(first), y)].all()
        assert success.sum() > rule(tiny_net(x), y).sum()
        inputs = MinMargin(rule).prepare(AttackStart(attack_model(tiny_net), x, x, y, None))
        after, before = (MinMargin(rule)(tiny_net(images), y, *inputs) for images in (x_adv, x))
        assert (after[~success] > before[~success]).float().mean() > 0.9

    def test_rejection_is_forced_exactly_where_the_score_can_be_lowered(self) -> None:
        net, x = LinearNet(0), centred_images(24, 0)
        y, eps = prediction(net(x)), 0.1
        drop = eps * net.aux.detach().abs().sum()
        level = float(net(x).aux.median() - drop)
        rule = Rejected(Rectifier(), float(torch.tensor(level).sigmoid()))
        attack = ForceRejectionEnsemble(Linf(eps), rule)
        quick = replace(
            attack.chain(), attacks=(attack.chain().attacks[0], Square(Linf(eps), queries=20))
        )
        rejected = rule(net(quick(net, x, y)), y)
        margin = (net(x).aux[:, 0] - drop - level).detach()
        assert rejected[margin < -1e-3].all()
        assert not rejected[margin > 1e-3].any()
        assert 4 < rejected.sum() < 20


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000))
def test_l2_ensemble_stays_in_the_ball_and_does_not_lose_successes(seed: int) -> None:
    net, x = LinearNet(seed), centred_images(8, seed)
    y = prediction(net(x))
    rule = AcceptedError(Con(), 0.3)
    attack = with_steps(RejectAutoAttackEnsemble(L2(0.8), rule, version="fast").chain(), 20)
    x_adv = attack(net, x, y)
    assert (L2(0).norm(x_adv - x) <= 0.8 * (1 + 1e-6)).all()
    assert x_adv.shape[1:] == SHAPE
    assert rule(as_output(net(x_adv)), y).sum() >= rule(net(x), y).sum()
