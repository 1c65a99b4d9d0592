"""Losses of heads against formulas on three classes, degenerate batches included."""

import math

import pytest
import torch
from torch import Tensor

from demur.attacks.objectives.rejector import CARLMargin, CARLObjective, RejectionHinge
from demur.data import Digits
from demur.errors import BadInput
from demur.methods import (
    ATRO,
    CARL,
    EBD,
    PGDAT,
    RR,
    TRADES,
    BatchOutputs,
    Head,
    LabelledOutput,
    Method,
    SNet,
    Standard,
)
from demur.nets import ResNet8
from demur.output import Output
from demur.rejectors import AcceptProbability, Energy, Rectifier

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 0.5]], dtype=torch.float64)
CORRECT = torch.tensor([0, 1, 0])
MIXED = torch.tensor([0, 0, 2])  # correct, wrong, wrong
WRONG = torch.tensor([2, 0, 2])


def outputs(aux: list[list[float]], logits: Tensor = LOGITS) -> Output:
    return Output(logits, logits[:, :0], torch.tensor(aux, dtype=torch.float64))


def batch_outputs(out: Output, y: Tensor) -> BatchOutputs:
    return BatchOutputs(LabelledOutput(out.logits, y, out))


NO_AUX: list[list[float]] = [[], [], []]
ENERGY = [math.log(sum(math.exp(v) for v in row)) for row in LOGITS.tolist()]


# ------------------------------------------------------------------ EBD


def test_ebd_loss_equals_its_formula() -> None:
    head = EBD(m_in=3.0, m_out=1.5, weight=0.1)
    loss = head.auxiliary_loss(batch_outputs(outputs(NO_AUX), MIXED))
    inside = max(0.0, 3.0 - ENERGY[0]) ** 2
    outside = [max(0.0, e - 1.5) ** 2 for e in ENERGY[1:]]
    assert loss.mean().item() == pytest.approx(0.1 * (inside + sum(outside) / 2))
    assert head.rejectors() == {"Energy": Energy()}


@pytest.mark.parametrize("y", [CORRECT, WRONG], ids=["all correct", "all wrong"])
def test_ebd_has_no_loss_and_no_gradient_without_both_correct_and_wrong_predictions(
    y: Tensor,
) -> None:
    logits = LOGITS.clone().requires_grad_()
    loss = EBD(m_in=30.0, m_out=-30.0).auxiliary_loss(batch_outputs(outputs(NO_AUX, logits), y))
    assert loss.tolist() == [0, 0, 0]
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert not grad.any()


def test_ebd_with_clean_images_as_inliers() -> None:
    head = EBD(m_in=4.0, m_out=1.0, weight=1.0, outside="attacked")
    assert head.needs_clean
    batch_out = BatchOutputs(
        LabelledOutput(LOGITS, CORRECT, outputs(NO_AUX)),
        LabelledOutput(LOGITS, CORRECT, outputs(NO_AUX)),
    )
    by_hand = [max(0, 4 - e) ** 2 + max(0, e - 1) ** 2 for e in ENERGY]
    assert head.auxiliary_loss(batch_out).tolist() == pytest.approx(by_hand)


def test_the_papers_swapped_bounds_penalise_every_wrong_prediction() -> None:
    """m_in=-5, m_out=-23: bounds for the energy with the opposite sign, as the paper tried."""
    loss = EBD(m_in=-5.0, m_out=-23.0, weight=1.0).auxiliary_loss(
        batch_outputs(outputs(NO_AUX), MIXED)
    )
    by_hand = sum((e + 23) ** 2 for e in ENERGY[1:]) / 2
    assert loss.mean().item() == pytest.approx(by_hand)


# ------------------------------------------------------------------ SNet

AUX = [[1.0, 2.0, 0.0, -1.0], [-2.0, 0.0, 0.0, 0.0], [0.5, 1.0, 2.0, 3.0]]
G = [1 / (1 + math.exp(-row[0])) for row in AUX]


def auxiliary_classifier_loss(y: list[int]) -> float:
    rows = [row[1:] for row in AUX]
    losses = [
        math.log(sum(math.exp(v) for v in r)) - r[label] for r, label in zip(rows, y, strict=True)
    ]
    return sum(losses) / 3


@pytest.mark.parametrize("divided", [True, False])
def test_snet_loss_equals_its_formula(divided: bool) -> None:
    head = SNet(coverage=0.9, weight=8.0, divided=divided)
    loss = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    total = head.loss(loss, batch_outputs(outputs(AUX), MIXED))
    risk = sum(g * e for g, e in zip(G, loss.tolist(), strict=True)) / 3
    risk /= sum(G) / 3 if divided else 1
    missing = max(0.0, 0.9 - sum(G) / 3) ** 2
    expected = 0.5 * (risk + 8 * missing) + 0.5 * auxiliary_classifier_loss(MIXED.tolist())
    assert total.item() == pytest.approx(expected)
    assert head.rejectors() == {"SNet": Rectifier()}


def test_snet_loss_is_finite_at_zero_coverage() -> None:
    reject_all = [[-2000.0, 0, 0, 0]] * 3
    loss = SNet().loss(
        torch.ones(3, dtype=torch.float64), batch_outputs(outputs(reject_all), CORRECT)
    )
    assert loss.item() == pytest.approx(0.5 * 8 * 0.7**2 + 0.5 * math.log(3))


# ------------------------------------------------------------------ ATRO


def test_atro_hinge_equals_its_formula() -> None:
    out, y = outputs([[0.3], [-1.0], [2.0]]), MIXED
    p, r = LOGITS.softmax(1), torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64).tanh()
    for i, label in enumerate(y.tolist()):
        for form, f in (("paper", p), ("authors", LOGITS)):
            signs = [1 if k == label else -1 for k in range(3)]
            a = sum(1 + (r[i] - t * f[i, k]) / 2 for k, t in enumerate(signs)) / 3
            b = 0.3 * (1 - 2.5 * r[i])
            expected = max(a, b) if form == "paper" else max(a, b, 0) ** 2
            hinge = RejectionHinge(0.3, form)  # type: ignore[arg-type]
            assert hinge(out, y)[i].item() == pytest.approx(float(expected))


def test_atro_adds_its_hinge_to_the_loss_or_replaces_it() -> None:
    out, loss = outputs([[0.3], [-1.0], [2.0]]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    batch_out = batch_outputs(out, MIXED)
    hinge = RejectionHinge(0.3)(out, MIXED).mean()
    assert torch.isclose(ATRO(weight=0.5).loss(loss, batch_out), 2 + 0.5 * hinge)
    squared = RejectionHinge(0.3, "authors")(out, MIXED).mean()
    assert torch.equal(ATRO(form="authors").loss(loss, batch_out), squared)


def test_a_rejection_cost_of_one_half_raises() -> None:
    with pytest.raises(BadInput, match=r"must be below 0\.5"):
        RejectionHinge(0.5)


def test_on_probabilities_the_optimal_r_barely_depends_on_the_image() -> None:
    """It is linear in the true confidence with slope 0.8 / C, here with C = 10."""
    best = []
    for true in (0.0, 1.0):
        logits = torch.full((1, 10), -40.0, dtype=torch.float64)
        logits[0, 0 if true else 1] = 40.0
        aux = torch.linspace(-3, 3, 2001, dtype=torch.float64)[:, None]
        out = Output(logits.expand(2001, 10), aux[:, :0], aux)
        loss = RejectionHinge(0.3)(out, torch.zeros(2001, dtype=torch.int64))
        best.append(aux[loss.argmin(), 0].tanh().item())
    assert best[1] - best[0] == pytest.approx(0.08, abs=0.005)


@pytest.mark.parametrize("cost", [0.3, 0.4, 0.45])
def test_on_probabilities_the_optimal_r_is_at_a_quantile_of_the_true_confidence(
    cost: float,
) -> None:
    """For many images with equal features, and so with one r."""
    true = torch.rand(999, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = torch.log(torch.stack([true, 1 - true], 1))
    r = torch.linspace(-0.999, 0.999, 4001, dtype=torch.float64)
    losses = []
    for part in r.atanh().split(100):  # many at once are faster, all need a gigabyte
        aux, n = part.repeat_interleave(999)[:, None], len(part)
        out = Output(logits.repeat(n, 1), aux[:, :0], aux)
        losses.append(RejectionHinge(cost)(out, true.long().repeat(n)).view(n, 999).mean(1))
    best = r[torch.cat(losses).argmin()]
    # the true confidence at which both arguments of the maximum are equal
    crossing = 0.5 + 2 * ((1 + best / 2) - cost * (1 - best / (1 - 2 * cost)))
    assert crossing.item() == pytest.approx(true.quantile(2 * cost).item(), abs=0.005)


# ------------------------------------------------------------------ CARL


def test_carl_losses_equal_their_formulas() -> None:
    out = outputs([[0.3], [-1.0], [2.0]])
    for i, (label, aux) in enumerate(zip(MIXED.tolist(), (0.3, -1.0, 2.0), strict=True)):
        row = LOGITS[i].tolist()
        total = sum(math.exp(v) for v in row) + math.exp(aux)
        safe = (math.exp(row[label]) + math.exp(aux)) / total
        assert CARLObjective()(out, MIXED)[i].item() == pytest.approx(-math.log(safe))
        accepts = 1 - math.exp(aux) / total
        assert AcceptProbability()(out)[i].item() == pytest.approx(accepts)
        wrong = max(v for k, v in enumerate(row) if k != label)
        assert CARLMargin()(out, MIXED)[i].item() == pytest.approx(wrong - max(row[label], aux))


def linear_net_penalty(form: str, grad_penalty: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient penalty of a linear net, the mean L1 norm of the margins' gradients, the weight."""
    weight = torch.tensor([[1.0, -2.0], [0.5, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    weight.requires_grad_()
    x = torch.tensor([[0.2, 0.4], [0.1, 0.9], [0.5, 0.5]], dtype=torch.float64)[:count]
    x = x.requires_grad_()
    y = MIXED[:count]
    out = Output(x @ weight.t(), x[:, :0], torch.full((count, 1), -9.0, dtype=torch.float64))
    labelled = LabelledOutput(x, y, out)
    head = CARL(grad_penalty=grad_penalty, form=form)  # type: ignore[arg-type]
    zeros = torch.zeros(count, dtype=torch.float64)
    unpenalised = CARL(0.5, 0.0, form)  # type: ignore[arg-type]
    penalised, plain = (
        h.loss(zeros, BatchOutputs(labelled, labelled)) for h in (head, unpenalised)
    )
    wrongs = [max((k for k in range(3) if k != t), key=lambda k: row[k].item())
              for row, t in zip(out.logits, y.tolist(), strict=True)]  # fmt: skip
    norms = [(weight[w] - weight[t]).abs().sum() for w, t in zip(wrongs, y.tolist(), strict=True)]
    return penalised - plain, torch.stack(norms).mean(), weight


@pytest.mark.parametrize("count", [1, 3])
def test_the_gradient_penalty_equals_its_formula(count: int) -> None:
    """Authors: the mean L1 norm; the paper's code: that divided by the batch size."""
    for form, divisor in (("authors", 1), ("paper", count)):
        penalty, norm, weight = linear_net_penalty(form, 0.02, count)
        assert penalty.item() == pytest.approx(0.02 * norm.item() / divisor)
        (grad,) = torch.autograd.grad(penalty, weight)
        assert grad.any()  # through the second derivative


def test_the_gradient_penalty_has_the_gradient_of_finite_differences() -> None:
    """A second derivative through the convolutions of a small net."""
    net = ResNet8(4).build(Digits().domain, CARL()).double().train()
    g = torch.Generator().manual_seed(0)
    x = torch.rand(4, *Digits().domain.shape, generator=g, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3])
    method = Method(Standard(), CARL(weight=0.0, grad_penalty=1.0, form="authors"))

    def penalty() -> Tensor:
        batch_out = method.outputs(net, x, x, y)
        return method.head.auxiliary_loss(batch_out).mean()  # type: ignore[union-attr]

    weight = net.trunk.stem.weight  # type: ignore[union-attr]
    (grad,) = torch.autograd.grad(penalty(), weight)  # type: ignore[arg-type]
    step = 1e-6
    for entry in [(0, 0, 1, 1), (2, 0, 0, 2)]:
        with torch.no_grad():
            weight[entry] += step  # type: ignore[index,operator]
        above = penalty().item()
        with torch.no_grad():
            weight[entry] -= 2 * step  # type: ignore[index,operator]
        below = penalty().item()
        with torch.no_grad():
            weight[entry] += step  # type: ignore[index,operator]
        assert grad[entry].item() == pytest.approx((above - below) / (2 * step), rel=1e-3, abs=1e-5)


def test_the_authors_carl_minimises_cross_entropy_over_all_classes_on_clean_images() -> None:
    clean, attacked = outputs([[0.3], [-1.0], [2.0]]), outputs([[0.0]] * 3, LOGITS * 2)
    batch_out = BatchOutputs(
        LabelledOutput(LOGITS, MIXED, attacked), LabelledOutput(LOGITS, MIXED, clean)
    )
    loss = CARL(weight=0.5, grad_penalty=0.0, form="authors").loss(
        torch.full((3,), 99.0), batch_out
    )
    joint = torch.cat([clean.logits, clean.aux], 1)
    expected = (
        torch.nn.functional.cross_entropy(joint, MIXED)
        + 0.5 * CARLObjective()(attacked, MIXED).mean()
    )
    assert loss.item() == pytest.approx(expected.item())


# ------------------------------------------------------------------ combinations


@pytest.mark.parametrize("head", [ATRO(), CARL(), RR(joint=True)])
def test_a_head_with_its_own_attack_objective_raises_with_trades(head: Head) -> None:
    with pytest.raises(BadInput, match="TRADES fixes the objective of its attack"):
        Method(TRADES(), head)


def test_heads_set_the_attack_objective_and_batch_norm_mode() -> None:
    atro = ATRO().adapt_framework(PGDAT(bn="train"))
    assert isinstance(atro, PGDAT)
    assert atro.bn == "eval"
    assert atro.attack.objective == RejectionHinge(0.3)  # type: ignore[attr-defined]
    carl = CARL().adapt_framework(PGDAT(bn="batch"))
    assert isinstance(carl, PGDAT)
    assert carl.bn == "batch"
    assert carl.attack.objective == CARLObjective()  # type: ignore[attr-defined]
    assert CARL().adapt_framework(Standard()) == Standard()


def test_heads_without_a_gradient_raise() -> None:
    with pytest.raises(BadInput, match="joint=true needs gradient_to=net"):
        RR(joint=True, gradient_to="head")
    with pytest.raises(BadInput, match="has no A to train"):
        RR(construction="con", gradient_to="head")
