"""Goals by hand on a few logits, what they remember, and attacks with targets."""

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
    Evasion,
    FrankWolfe,
    LogitMargin,
    Misclassified,
    MultiTarget,
    RRLoss,
    ScoreObjective,
    TargetedConfidence,
    TargetedDLR,
    TargetedMargin,
    WrongConfidence,
)
from demur.attacks.batch import AttackBatch
from demur.attacks.objectives import AttackStart
from demur.balls import Linf
from demur.errors import BadInput
from demur.methods import RR
from demur.nets import RejectingNet
from demur.noise import Stream
from demur.output import Output, as_output, prediction, rcon
from demur.recipes import RECIPES, attack, recipe
from demur.rejectors import Con, RCon
from tests.linear import LinearNet, centred_images

LOGITS = torch.tensor([[3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
OUT = Output(LOGITS, LOGITS[:, :0], torch.zeros(1, 1, dtype=torch.float64))
FIRST, LAST = torch.tensor([0]), torch.tensor([3])


def test_margins_by_hand() -> None:
    assert LogitMargin()(OUT, FIRST).item() == -2
    assert DLR()(OUT, FIRST).item() == pytest.approx(-2 / 3)
    assert DLR()(OUT, LAST).item() == pytest.approx(4 / 3)
    assert TargetedMargin()(OUT, FIRST, LAST).item() == -4
    assert TargetedDLR()(OUT, FIRST, LAST).item() == pytest.approx(-4 / (3 - (0 - 1) / 2))


@pytest.mark.parametrize(("classes", "below"), [(2, 1.0), (3, 3.0), (4, 3.5)])
def test_ratios_degrade_with_few_classes(classes: int, below: float) -> None:
    few = OUT._replace(logits=LOGITS[:, :classes])
    target = torch.tensor([1])
    assert TargetedDLR()(few, FIRST, target).item() == pytest.approx(-2 / below)
    assert DLR()(few, FIRST).item() == pytest.approx(-2 / min(below, 3))


@given(st.integers(0, 2**32), st.floats(0.1, 100), st.floats(-50, 50))
def test_ratios_do_not_see_scale_or_shift(seed: int, scale: float, shift: float) -> None:
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


def test_rr_loss_is_the_loss_that_a_learned_by() -> None:
    for y in (FIRST, LAST):
        assert torch.allclose(RRLoss()(OUT, y), RR().loss_per_image(OUT, y))
    aux = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(RRLoss()(OUT._replace(aux=aux), FIRST).sum(), aux)
    assert grad.item() < 0, "where R-Con is below T-Con, raising the loss lowers it further"


def test_relaxed_by_hand_and_fading() -> None:
    objective = GAMA(weight=8.0, fade=4)
    start = torch.full((1, 4), 0.25, dtype=torch.float64)
    p = LOGITS[0].softmax(0)
    away = float(((p - 0.25) ** 2).sum())
    kept = start, torch.zeros(1, dtype=torch.float64)
    for step, weight in ((0, 8.0), (1, 6.0), (4, 0.0), (90, 0.0)):
        value = objective(OUT, FIRST, *objective.at_step(kept, step, 100))
        assert value.item() == pytest.approx(float(p[1] - p[0]) + weight * away)


def test_sums_share_out_what_their_goals_remember() -> None:
    objective = (
        CE()
        + 2.0 * GAMA(weight=8.0)
        + Evasion(Con(), base_objective=TargetedMargin())
        + TargetedDLR()
    )
    assert objective.n_inputs == 0 + 2 + 1 + 1
    x = torch.zeros(1, 3)
    start_point = AttackStart(lambda x: OUT, x, x, FIRST, LAST)
    given = objective.at_step(objective.prepare(start_point), 0, 10)
    assert len(given) == objective.n_inputs
    by_hand = (
        CE()(OUT, FIRST) + 2 * GAMA(weight=8.0)(OUT, FIRST, *given[:2])
        + TargetedMargin()(OUT, FIRST, LAST) + Con().log_score(OUT) + TargetedDLR()(OUT, FIRST, LAST)
    )  # fmt: skip
    assert torch.allclose(objective(OUT, FIRST, *given), by_hand)


def test_a_targeted_goal_without_a_target_is_refused() -> None:
    with pytest.raises(BadInput, match="use it in EachTarget"):
        PGD(Linf(0.1), objective=TargetedMargin())(
            LinearNet(), centred_images(2), torch.zeros(2).long()
        )


def test_each_target_tries_the_best_wrong_class_first_and_all_in_the_end() -> None:
    net, x = LinearNet(), centred_images(4)
    logits = as_output(net(x)).logits
    y = logits.argmax(1)
    tried: list[Tensor] = []

    class Spy(PGD):
        def run(self, on: AttackBatch, stream: Stream) -> Tensor:
            assert on.target is not None
            tried.append(on.target)
            return on.x

    MultiTarget(Spy(Linf(0.1), objective=TargetedMargin()))(net, x, y)
    classes = logits.shape[1]
    ranked = logits.scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)
    assert torch.equal(torch.stack(tried), ranked[:, : classes - 1].t())
    tried.clear()
    MultiTarget(Spy(Linf(0.1), objective=TargetedMargin()), targets=99)(net, x, y)
    assert len(tried) == classes - 1


def test_targets_break_at_least_what_the_margin_breaks(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    plain = PGD(Linf(0.15), steps=10, objective=LogitMargin())
    targeted = MultiTarget(replace(plain, objective=TargetedMargin()), keep="success")
    broken = [(prediction(tiny_net(a(tiny_net, x, y))) != y).sum() for a in (plain, targeted)]
    assert broken[1] >= broken[0]


def test_each_target_kept_by_a_rule_gets_more_past_it(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    slips = AcceptedError(RCon(), 0.5)
    inner = PGD(Linf(0.2), steps=10, objective=Evasion(RCon(), base_objective=TargetedConfidence()))
    by_rule = MultiTarget(inner, keep="success", criterion=slips)
    by_loss = MultiTarget(inner, criterion=Misclassified())
    past = [slips(tiny_net(a(tiny_net, x, y)), y).sum() for a in (by_loss, by_rule)]
    assert past[1] >= past[0]


def test_gama_is_the_authors(tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]) -> None:
    recipe = RECIPES["cifar10-pgdat-rr"]
    gama, walk = attack("gama-pgd", recipe), attack("gama-fw", recipe)
    assert isinstance(gama, PGD)
    assert isinstance(walk, FrankWolfe)
    lengths = [gama._dropped(step) * (gama.step_size or 0) for step in (0, 59, 60, 84, 85)]
    assert lengths == pytest.approx([16 / 255, 16 / 255, 1.6 / 255, 1.6 / 255, 0.16 / 255])
    assert [walk.mix * walk._dropped(s) for s in (0, 60, 85)] == pytest.approx([0.5, 0.1, 0.02])
    assert gama.objective == walk.objective == GAMA(50.0, 25)
    x, _ = batch
    start = gama._start(x, torch.arange(len(x)), 0)
    inner = (x > 8 / 255) & (x < 1 - 8 / 255)
    assert torch.allclose((start - x).abs()[inner], torch.tensor(8 / 255))


def test_frank_wolfe_moves_a_share_of_the_way_to_the_corner() -> None:
    x, grad = torch.full((1, 1, 1, 2), 0.5), torch.tensor([[[[2.0, -3.0]]]])
    step = FrankWolfe(Linf(0.1), mix=0.5).moved(x, x, grad, 0)
    assert torch.allclose(step - x, torch.tensor([0.05, -0.05]))
    again = FrankWolfe(Linf(0.1), mix=0.5).moved(x, step, grad, 1)
    assert torch.allclose(again - x, torch.tensor([0.075, -0.075]))


def test_raising_rcon_raises_it(tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    x_adv = PGD(Linf(0.1), steps=5, start="clean", objective=ScoreObjective(RCon()))(tiny_net, x, y)
    assert (rcon(tiny_net(x_adv)) > rcon(tiny_net(x))).float().mean() > 0.9


@pytest.mark.parametrize("name", ["xi", "adaptive-ce-rr", "adaptive-targets-rr"])
@pytest.mark.parametrize("trained", ["digits-pgdat-snet", "digits-pgdat-carl", "digits-pgdat"])
def test_attacks_on_a_need_an_a(name: str, trained: str) -> None:
    with pytest.raises(BadInput, match=r"head=RR\(\)"):
        attack(name, RECIPES[trained])


def test_the_objective_is_the_one_that_a_was_trained_by() -> None:
    made = attack("adaptive-ce-rr", recipe("digits-pgdat-rr", ["rr_loss=squared", "tau=0.5"]))
    assert made.objective == CE() + 1.0 * RRLoss(0.5, "product", "squared")  # type: ignore[attr-defined]
