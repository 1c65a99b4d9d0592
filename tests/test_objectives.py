"""Objectives by hand on a few logits, their state, and targeted attacks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from demur.attacks import (
    CE,
    DLR,
    GAMA,
    PGD,
    AcceptedError,
    FrankWolfe,
    Misclassified,
    MultiTarget,
    PlusLogScore,
    RRLoss,
    ScoreObjective,
    TargetedConfidence,
    TargetedDLR,
    TargetedMargin,
    UntargetedMargin,
    WrongConfidence,
)
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import attack_model
from demur.attacks.balls import Linf
from demur.attacks.objectives.classification import AttackStart
from demur.errors import BadInput
from demur.methods import RR
from demur.noise import Stream
from demur.output import Output, as_output, prediction
from demur.recipes import RECIPES, attack, recipe
from demur.rejectors import Con, RCon
from demur.rejectors.certainty import rcon
from tests.linear import LinearNet, centred_images
from tests.quick_net import QuickNet

LOGITS = torch.tensor([[3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
OUT = Output(LOGITS, LOGITS[:, :0], torch.zeros(1, 1, dtype=torch.float64))
FIRST, LAST = torch.tensor([0]), torch.tensor([3])


def test_margins_by_hand() -> None:
    assert UntargetedMargin()(OUT, FIRST).item() == -2
    assert DLR()(OUT, FIRST).item() == pytest.approx(-2 / 3)
    assert DLR()(OUT, LAST).item() == pytest.approx(4 / 3)
    assert TargetedMargin()(OUT, FIRST, LAST).item() == -4
    assert TargetedDLR()(OUT, FIRST, LAST).item() == pytest.approx(-4 / (3 - (0 - 1) / 2))


@pytest.mark.parametrize(("classes", "divisor"), [(2, 1.0), (3, 3.0), (4, 3.5)])
def test_dlr_with_few_classes(classes: int, divisor: float) -> None:
    few = OUT._replace(logits=LOGITS[:, :classes])
    target = torch.tensor([1])
    assert TargetedDLR()(few, FIRST, target).item() == pytest.approx(-2 / divisor)
    assert DLR()(few, FIRST).item() == pytest.approx(-2 / min(divisor, 3))


@given(st.integers(0, 2**32), st.floats(0.1, 100), st.floats(-50, 50))
def test_dlr_is_invariant_to_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 6, generator=g, dtype=torch.float64)
    y, target = torch.arange(5), torch.arange(1, 6)
    one = OUT._replace(logits=logits)
    other = OUT._replace(logits=scale * logits + shift)
    assert torch.allclose(DLR()(one, y), DLR()(other, y), rtol=1e-6)
    assert torch.allclose(TargetedDLR()(one, y, target), TargetedDLR()(other, y, target), rtol=1e-6)


def test_confidences_by_hand() -> None:
    p = LOGITS[0].softmax(0)
    assert WrongConfidence()(OUT, FIRST).item() == pytest.approx(math.log(p[1]))
    assert WrongConfidence()(OUT, LAST).item() == pytest.approx(math.log(p[0]))
    assert TargetedConfidence()(OUT, FIRST, LAST).item() == pytest.approx(math.log(p[3]))
    assert ScoreObjective(RCon())(OUT, FIRST).item() == pytest.approx(p[0].item() / 2)


def test_rr_loss_is_the_training_loss_of_the_rectifier() -> None:
    for y in (FIRST, LAST):
        assert torch.allclose(RRLoss()(OUT, y), RR().loss_per_image(OUT, y))
    aux = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(RRLoss()(OUT._replace(aux=aux), FIRST).sum(), aux)
    assert grad.item() < 0, "where R-Con is below T-Con, raising the loss lowers it further"


def test_gama_by_hand_with_decaying_weight() -> None:
    objective = GAMA(weight=8.0, fade=4)
    start = torch.full((1, 4), 0.25, dtype=torch.float64)
    p = LOGITS[0].softmax(0)
    squared_distance = float(((p - 0.25) ** 2).sum())
    state = start, torch.zeros(1, dtype=torch.float64)
    for step, weight in ((0, 8.0), (1, 6.0), (4, 0.0), (90, 0.0)):
        value = objective(OUT, FIRST, *objective.at_step(state, step, 100))
        assert value.item() == pytest.approx(float(p[1] - p[0]) + weight * squared_distance)


def test_a_sum_passes_each_objective_its_own_inputs() -> None:
    objective = (
        CE()
        + 2.0 * GAMA(weight=8.0)
        + PlusLogScore(Con(), base_objective=TargetedMargin())
        + TargetedDLR()
    )
    assert objective.n_inputs == 0 + 2 + 1 + 1
    x = torch.zeros(1, 3)
    start_point = AttackStart(attack_model(lambda x: OUT), x, x, FIRST, LAST)
    inputs = objective.at_step(objective.prepare(start_point), 0, 10)
    assert len(inputs) == objective.n_inputs
    by_hand = (
        CE()(OUT, FIRST) + 2 * GAMA(weight=8.0)(OUT, FIRST, *inputs[:2])
        + TargetedMargin()(OUT, FIRST, LAST) + Con().log_score(OUT)
        + TargetedDLR()(OUT, FIRST, LAST)
    )  # fmt: skip
    assert torch.allclose(objective(OUT, FIRST, *inputs), by_hand)


def test_a_targeted_objective_without_a_target_raises() -> None:
    with pytest.raises(BadInput, match="wrap the attack in MultiTarget"):
        PGD(Linf(0.1), objective=TargetedMargin())(
            LinearNet(), centred_images(2), torch.zeros(2).long()
        )


def test_multi_target_tries_wrong_classes_by_decreasing_logit() -> None:
    net, x = LinearNet(), centred_images(4)
    logits = as_output(net(x)).logits
    y = logits.argmax(1)
    tried: list[Tensor] = []

    class RecordTargets(PGD):
        def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
            assert batch.target is not None
            tried.append(batch.target)
            return batch.x

    MultiTarget(RecordTargets(Linf(0.1), objective=TargetedMargin()))(net, x, y)
    classes = logits.shape[1]
    ranked = logits.scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)
    assert torch.equal(torch.stack(tried), ranked[:, : classes - 1].t())
    tried.clear()
    MultiTarget(RecordTargets(Linf(0.1), objective=TargetedMargin()), targets=99)(net, x, y)
    assert len(tried) == classes - 1


def test_multi_target_succeeds_at_least_as_often_as_the_margin(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    plain = PGD(Linf(0.15), steps=10, objective=UntargetedMargin())
    targeted = MultiTarget(replace(plain, objective=TargetedMargin()), keep="success")
    successes = [(prediction(quick_net(a(quick_net, x, y))) != y).sum() for a in (plain, targeted)]
    assert successes[1] >= successes[0]


def test_multi_target_with_a_rule_finds_more_accepted_errors(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    rule = AcceptedError(RCon(), 0.3)
    inner = PGD(
        Linf(0.2), steps=10, objective=PlusLogScore(RCon(), base_objective=TargetedConfidence())
    )
    by_rule = MultiTarget(inner, keep="success", criterion=rule)
    by_loss = MultiTarget(inner, criterion=Misclassified())
    successes = [rule(quick_net(a(quick_net, x, y)), y).sum() for a in (by_loss, by_rule)]
    assert successes[1] >= successes[0]
    assert successes[1] > 0


def test_gama_attacks_match_the_reference_code(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    recipe = RECIPES["cifar10-pgdat-rr"]
    gama, frank_wolfe = attack("gama-pgd", recipe), attack("gama-fw", recipe)
    assert isinstance(gama, PGD)
    assert isinstance(frank_wolfe, FrankWolfe)
    step_sizes = [gama._decay(step) * (gama.step_size or 0) for step in (0, 59, 60, 84, 85)]
    assert step_sizes == pytest.approx([16 / 255, 16 / 255, 1.6 / 255, 1.6 / 255, 0.16 / 255])
    assert [frank_wolfe.mix * frank_wolfe._decay(s) for s in (0, 60, 85)] == pytest.approx(
        [0.5, 0.1, 0.02]
    )
    assert gama.objective == frank_wolfe.objective == GAMA(50.0, 25)
    x, _ = batch
    start = gama._first_iterate(x, torch.arange(len(x)), 0)
    unclamped = (x > 8 / 255) & (x < 1 - 8 / 255)
    assert torch.allclose((start - x).abs()[unclamped], torch.tensor(8 / 255))


def test_frank_wolfe_moves_part_of_the_way_to_the_corner() -> None:
    x, grad = torch.full((1, 1, 1, 2), 0.5), torch.tensor([[[[2.0, -3.0]]]])
    step = FrankWolfe(Linf(0.1), mix=0.5).next_iterate(x, x, grad, 0)
    assert torch.allclose(step - x, torch.tensor([0.05, -0.05]))
    again = FrankWolfe(Linf(0.1), mix=0.5).next_iterate(x, step, grad, 1)
    assert torch.allclose(again - x, torch.tensor([0.075, -0.075]))


def test_score_objective_raises_rcon(quick_net: QuickNet, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    attack = PGD(Linf(0.1), steps=5, start="clean", objective=ScoreObjective(RCon()))
    x_adv = attack(quick_net, x, y)
    assert (rcon(quick_net(x_adv)) > rcon(quick_net(x))).float().mean() > 0.9


@pytest.mark.parametrize("name", ["xi", "adaptive-ce-rr", "adaptive-targets-rr"])
@pytest.mark.parametrize("trained", ["digits-pgdat-snet", "digits-pgdat-carl", "digits-pgdat"])
def test_attacks_on_the_rectifier_need_a_rectifier(name: str, trained: str) -> None:
    with pytest.raises(BadInput, match=r"head=RR\(\)"):
        attack(name, RECIPES[trained])


def test_the_rr_objective_uses_the_training_loss_of_the_recipe() -> None:
    made = attack("adaptive-ce-rr", recipe("digits-pgdat-rr", ["rr_loss=squared", "tau=0.5"]))
    assert made.objective == CE() + 1.0 * RRLoss(0.5, "product", "squared")  # type: ignore[attr-defined]
