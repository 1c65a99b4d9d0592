"""The losses of heads by hand on three classes, degenerate batches too, and who gets gradients."""

import math

import pytest
import torch
from torch import Tensor

from demur.attacks.objectives import CARLMargin, CARLObjective, RejectionHinge
from demur.data import Digits
from demur.errors import BadInput
from demur.methods import ATRO, CARL, EBD, PGDAT, RR, TRADES, Head, Method, SNet, Standard
from demur.methods.outputs import BatchOutputs, LabelledOutput
from demur.nets import Small
from demur.output import Output
from demur.rejectors import AcceptProbability, Energy, Rectifier

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 0.5]], dtype=torch.float64)
RIGHT = torch.tensor([0, 1, 0])
MIXED = torch.tensor([0, 0, 2])  # right, wrong, wrong
WRONG = torch.tensor([2, 0, 2])


def outputs(aux: list[list[float]], logits: Tensor = LOGITS) -> Output:
    return Output(logits, logits[:, :0], torch.tensor(aux, dtype=torch.float64))


def batch_outputs(out: Output, y: Tensor) -> BatchOutputs:
    return BatchOutputs(LabelledOutput(out.logits, y, out))


NONE: list[list[float]] = [[], [], []]
ENERGY = [math.log(sum(math.exp(v) for v in row)) for row in LOGITS.tolist()]


# ------------------------------------------------------------------ EBD


def test_ebd_by_hand() -> None:
    head = EBD(m_in=3.0, m_out=1.5, weight=0.1)
    each = head.auxiliary_loss(batch_outputs(outputs(NONE), MIXED))
    inside = max(0.0, 3.0 - ENERGY[0]) ** 2
    outside = [max(0.0, e - 1.5) ** 2 for e in ENERGY[1:]]
    assert each.mean().item() == pytest.approx(0.1 * (inside + sum(outside) / 2))
    assert head.rejectors() == {"Energy": Energy()}


@pytest.mark.parametrize("y", [RIGHT, WRONG], ids=["all right", "all wrong"])
def test_ebd_learns_nothing_from_a_batch_of_one_kind(y: Tensor) -> None:
    logits = LOGITS.clone().requires_grad_()
    each = EBD(m_in=30.0, m_out=-30.0).auxiliary_loss(batch_outputs(outputs(NONE, logits), y))
    assert each.tolist() == [0, 0, 0]
    (grad,) = torch.autograd.grad(each.sum(), logits)
    assert not grad.any()


def test_ebd_with_clean_images_inside() -> None:
    head = EBD(m_in=4.0, m_out=1.0, weight=1.0, outside="attacked")
    assert head.needs_clean
    batch_out = BatchOutputs(
        LabelledOutput(LOGITS, RIGHT, outputs(NONE)), LabelledOutput(LOGITS, RIGHT, outputs(NONE))
    )
    by_hand = [max(0, 4 - e) ** 2 + max(0, e - 1) ** 2 for e in ENERGY]
    assert head.auxiliary_loss(batch_out).tolist() == pytest.approx(by_hand)


def test_the_setting_that_cannot_work_prices_every_wrong_answer() -> None:
    """m_in=-5, m_out=-23: energies swapped and of the other sign, as the paper tried."""
    each = EBD(m_in=-5.0, m_out=-23.0, weight=1.0).auxiliary_loss(
        batch_outputs(outputs(NONE), MIXED)
    )
    by_hand = sum((e + 23) ** 2 for e in ENERGY[1:]) / 2
    assert each.mean().item() == pytest.approx(by_hand)


# ------------------------------------------------------------------ SNet

AUX = [[1.0, 2.0, 0.0, -1.0], [-2.0, 0.0, 0.0, 0.0], [0.5, 1.0, 2.0, 3.0]]
G = [1 / (1 + math.exp(-row[0])) for row in AUX]


def second_classifier(y: list[int]) -> float:
    rows = [row[1:] for row in AUX]
    losses = [
        math.log(sum(math.exp(v) for v in r)) - r[label] for r, label in zip(rows, y, strict=True)
    ]
    return sum(losses) / 3


@pytest.mark.parametrize("divided", [True, False])
def test_snet_by_hand(divided: bool) -> None:
    head = SNet(coverage=0.9, weight=8.0, divided=divided)
    each = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    loss = head.loss(each, batch_outputs(outputs(AUX), MIXED))
    risk = sum(g * e for g, e in zip(G, each.tolist(), strict=True)) / 3
    risk /= sum(G) / 3 if divided else 1
    missing = max(0.0, 0.9 - sum(G) / 3) ** 2
    expected = 0.5 * (risk + 8 * missing) + 0.5 * second_classifier(MIXED.tolist())
    assert loss.item() == pytest.approx(expected)
    assert head.rejectors() == {"SNet": Rectifier()}


def test_snet_that_answers_nothing_is_still_a_number() -> None:
    shut = [[-2000.0, 0, 0, 0]] * 3
    loss = SNet().loss(torch.ones(3, dtype=torch.float64), batch_outputs(outputs(shut), RIGHT))
    assert loss.item() == pytest.approx(0.5 * 8 * 0.7**2 + 0.5 * math.log(3))


# ------------------------------------------------------------------ ATRO


def test_atro_by_hand() -> None:
    out, y = outputs([[0.3], [-1.0], [2.0]]), MIXED
    p, r = LOGITS.softmax(1), torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64).tanh()
    for i, label in enumerate(y.tolist()):
        for form, f in (("paper", p), ("authors", LOGITS)):
            sides = [1 if k == label else -1 for k in range(3)]
            a = sum(1 + (r[i] - t * f[i, k]) / 2 for k, t in enumerate(sides)) / 3
            b = 0.3 * (1 - 2.5 * r[i])
            price = max(a, b) if form == "paper" else max(a, b, 0) ** 2
            hinge = RejectionHinge(0.3, form)  # type: ignore[arg-type]
            assert hinge(out, y)[i].item() == pytest.approx(float(price))


def test_atro_beside_the_frames_loss_or_in_its_place() -> None:
    out, each = outputs([[0.3], [-1.0], [2.0]]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    batch_out = batch_outputs(out, MIXED)
    hinge = RejectionHinge(0.3)(out, MIXED).mean()
    assert torch.isclose(ATRO(weight=0.5).loss(each, batch_out), 2 + 0.5 * hinge)
    squared = RejectionHinge(0.3, "authors")(out, MIXED).mean()
    assert torch.equal(ATRO(form="authors").loss(each, batch_out), squared)


def test_a_refusal_costs_less_than_a_coin() -> None:
    with pytest.raises(BadInput, match="must cost less than"):
        RejectionHinge(0.5)


def test_on_probabilities_the_best_rejection_hardly_depends_on_the_image() -> None:
    """A line of slope 0.8 / C: with ten classes r is nearly the same for every image."""
    best = []
    for true in (0.0, 1.0):
        logits = torch.full((1, 10), -40.0, dtype=torch.float64)
        logits[0, 0 if true else 1] = 40.0
        aux = torch.linspace(-3, 3, 2001, dtype=torch.float64)[:, None]
        out = Output(logits.expand(2001, 10), aux[:, :0], aux)
        price = RejectionHinge(0.3)(out, torch.zeros(2001, dtype=torch.int64))
        best.append(aux[price.argmin(), 0].tanh().item())
    assert best[1] - best[0] == pytest.approx(0.08, abs=0.005)


@pytest.mark.parametrize("cost", [0.3, 0.4, 0.45])
def test_on_probabilities_the_best_rejection_is_a_quantile_of_the_true_confidence(
    cost: float,
) -> None:
    """Of many images that look alike, so that they have one r."""
    true = torch.rand(999, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = torch.log(torch.stack([true, 1 - true], 1))
    r = torch.linspace(-0.999, 0.999, 4001, dtype=torch.float64)
    prices = [
        RejectionHinge(cost)(Output(logits, logits[:, :0], aux.expand(999, 1)), true.long()).mean()
        for aux in r.atanh()
    ]
    best = r[torch.stack(prices).argmin()]
    # where both prices are the same, solved for the true confidence
    there = 0.5 + 2 * ((1 + best / 2) - cost * (1 - best / (1 - 2 * cost)))
    assert there.item() == pytest.approx(true.quantile(2 * cost).item(), abs=0.005)


# ------------------------------------------------------------------ CARL


def test_carl_by_hand() -> None:
    out = outputs([[0.3], [-1.0], [2.0]])
    for i, (label, aux) in enumerate(zip(MIXED.tolist(), (0.3, -1.0, 2.0), strict=True)):
        row = LOGITS[i].tolist()
        total = sum(math.exp(v) for v in row) + math.exp(aux)
        safe = (math.exp(row[label]) + math.exp(aux)) / total
        assert CARLObjective()(out, MIXED)[i].item() == pytest.approx(-math.log(safe))
        answers = 1 - math.exp(aux) / total
        assert AcceptProbability()(out)[i].item() == pytest.approx(answers)
        wrong = max(v for k, v in enumerate(row) if k != label)
        assert CARLMargin()(out, MIXED)[i].item() == pytest.approx(wrong - max(row[label], aux))


def linear(form: str, grad_penalty: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """CARL's loss for a linear net on one image or several; the slope of its margin is known."""
    weight = torch.tensor([[1.0, -2.0], [0.5, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    weight.requires_grad_()
    x = torch.tensor([[0.2, 0.4], [0.1, 0.9], [0.5, 0.5]], dtype=torch.float64)[:count]
    x = x.requires_grad_()
    y = MIXED[:count]
    out = Output(x @ weight.t(), x[:, :0], torch.full((count, 1), -9.0, dtype=torch.float64))
    seen = LabelledOutput(x, y, out)
    head = CARL(grad_penalty=grad_penalty, form=form)  # type: ignore[arg-type]
    each = torch.zeros(count, dtype=torch.float64)
    unpenalised = CARL(0.5, 0.0, form)  # type: ignore[arg-type]
    with_it, without = (h.loss(each, BatchOutputs(seen, seen)) for h in (head, unpenalised))
    wrongs = [max((k for k in range(3) if k != t), key=lambda k: row[k].item())
              for row, t in zip(out.logits, y.tolist(), strict=True)]  # fmt: skip
    norms = [(weight[w] - weight[t]).abs().sum() for w, t in zip(wrongs, y.tolist(), strict=True)]
    return with_it - without, torch.stack(norms).mean(), weight


@pytest.mark.parametrize("count", [1, 3])
def test_the_price_of_a_slope_by_hand(count: int) -> None:
    """Authors: the mean L1 norm of each image's slope; the paper's code: that over the batch."""
    for form, divisor in (("authors", 1), ("paper", count)):
        price, norm, weight = linear(form, 0.02, count)
        assert price.item() == pytest.approx(0.02 * norm.item() / divisor)
        (grad,) = torch.autograd.grad(price, weight)
        assert grad.any()  # the second derivative is there


def test_the_slopes_price_has_the_right_gradient_in_a_real_net() -> None:
    """Differentiated twice through our own convolutions, against differences."""
    net = Small(4).build(Digits().domain, CARL()).double().train()
    g = torch.Generator().manual_seed(0)
    x = torch.rand(4, *Digits().domain.shape, generator=g, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3])
    method = Method(Standard(), CARL(weight=0.0, grad_penalty=1.0, form="authors"))

    def price() -> Tensor:
        batch_out = method.outputs(net, x, x, y)
        return method.head.auxiliary_loss(batch_out).mean()  # type: ignore[union-attr]

    weight = net.trunk.stem.weight  # type: ignore[union-attr]
    (grad,) = torch.autograd.grad(price(), weight)  # type: ignore[arg-type]
    step = 1e-6
    for place in [(0, 0, 1, 1), (2, 0, 0, 2)]:
        with torch.no_grad():
            weight[place] += step  # type: ignore[index,operator]
        above = price().item()
        with torch.no_grad():
            weight[place] -= 2 * step  # type: ignore[index,operator]
        below = price().item()
        with torch.no_grad():
            weight[place] += step  # type: ignore[index,operator]
        assert grad[place].item() == pytest.approx((above - below) / (2 * step), rel=1e-3, abs=1e-5)


def test_the_authors_carl_learns_all_classes_on_clean_images() -> None:
    clean, other = outputs([[0.3], [-1.0], [2.0]]), outputs([[0.0]] * 3, LOGITS * 2)
    batch_out = BatchOutputs(
        LabelledOutput(LOGITS, MIXED, other), LabelledOutput(LOGITS, MIXED, clean)
    )
    loss = CARL(weight=0.5, grad_penalty=0.0, form="authors").loss(
        torch.full((3,), 99.0), batch_out
    )
    joint = torch.cat([clean.logits, clean.aux], 1)
    expected = (
        torch.nn.functional.cross_entropy(joint, MIXED) + 0.5 * CARLObjective()(other, MIXED).mean()
    )
    assert loss.item() == pytest.approx(expected.item())


# ------------------------------------------------------------------ who goes with whom


@pytest.mark.parametrize("head", [ATRO(), CARL(), RR(joint=True)])
def test_a_head_with_images_of_its_own_is_refused_where_the_frame_has_its_own(head: Head) -> None:
    with pytest.raises(BadInput, match="TRADES learns from images crafted for its own goal"):
        Method(TRADES(), head)


def test_heads_bring_their_goals_and_modes() -> None:
    atro = ATRO().adapt_framework(PGDAT(bn="train"))
    assert isinstance(atro, PGDAT)
    assert atro.bn == "eval"
    assert atro.attack.objective == RejectionHinge(0.3)  # type: ignore[attr-defined]
    carl = CARL().adapt_framework(PGDAT(bn="batch"))
    assert isinstance(carl, PGDAT)
    assert carl.bn == "batch"
    assert carl.attack.objective == CARLObjective()  # type: ignore[attr-defined]
    assert CARL().adapt_framework(Standard()) == Standard()


def test_what_cannot_learn_is_refused() -> None:
    with pytest.raises(BadInput, match="joint=true needs gradient_to=net"):
        RR(joint=True, gradient_to="head")
    with pytest.raises(BadInput, match="no head to learn with"):
        RR(construction="con", gradient_to="head")
