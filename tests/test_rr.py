"""RR against formulas in every construction and loss, and the parameters its gradients reach."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from demur.data import Digits
from demur.methods import RR, BatchOutputs, LabelledOutput
from demur.nets import ResNet8
from demur.output import Output
from demur.rejectors import ConMinusRectifier
from demur.rejectors.certainty import (
    LINEAR_BELOW,
    RRLossKind,
    certainty,
    log_certainty,
    log_one_minus_rcon,
    log_rcon,
    rr_loss_per_image,
)

Stop = Literal["correct", "all", "none"]
LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 0.5]], dtype=torch.float64)
MIXED = torch.tensor([0, 0, 2])  # correct, wrong, wrong


def outputs(aux: list[list[float]], logits: Tensor = LOGITS) -> Output:
    return Output(logits, logits[:, :0], torch.tensor(aux, dtype=torch.float64))


# ------------------------------------------------------------------ the paper's loss


def by_hand(
    logits: Tensor, a: Tensor, y: int, stop_tcon: bool, stop_con: Stop
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and its derivatives with respect to the logits and the auxiliary logit."""
    p = logits.softmax(0)
    m, big_a = int(logits.argmax()), a.sigmoid()
    con, t = p[m], p[y]
    r = con * big_a
    loss = -t * r.log() - (1 - t) * (1 - r).log()
    by_r = (r - t) / (r * (1 - r))
    eye = torch.eye(len(p), dtype=p.dtype)
    through_con = by_r * big_a * con * (eye[m] - p)
    through_tcon = ((1 - r).log() - r.log()) * t * (eye[y] - p)
    stopped = stop_con == "all" or (stop_con == "correct" and m == y)
    by_logits = torch.zeros_like(p)
    by_logits += 0 if stopped else through_con
    by_logits += 0 if stop_tcon else through_tcon
    return loss, by_logits, by_r * con * big_a * (1 - big_a)


@pytest.mark.parametrize("stop_tcon", [True, False])
@pytest.mark.parametrize("stop_con", ["correct", "all", "none"])
@given(
    logits=st.lists(st.floats(-6, 6), min_size=3, max_size=3, unique=True),
    aux=st.floats(-6, 6),
    y=st.integers(0, 2),
)
def test_rr_loss_and_gradients_equal_the_derived_formulas(
    stop_tcon: bool, stop_con: Stop, logits: list[float], aux: float, y: int
) -> None:
    table = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[aux]], dtype=torch.float64, requires_grad=True)
    head = RR(stop_tcon=stop_tcon, stop_con=stop_con)
    loss = head.loss_per_image(Output(table, table[:, :0], a), torch.tensor([y]))
    by_logits, by_aux = torch.autograd.grad(loss.sum(), (table, a), materialize_grads=True)
    expected = by_hand(table[0].detach(), a[0, 0].detach(), y, stop_tcon, stop_con)
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-9, abs=1e-12)
    assert by_logits[0].tolist() == pytest.approx(expected[1].tolist(), rel=1e-7, abs=1e-9)
    assert by_aux.item() == pytest.approx(expected[2].item(), rel=1e-7, abs=1e-9)


def test_rr_equals_torch_bce_at_moderate_logits() -> None:
    g = torch.Generator().manual_seed(0)
    logits, a = torch.randn(50, 10, generator=g), torch.randn(50, 1, generator=g)
    y = torch.randint(0, 10, (50,), generator=g)
    out = Output(logits, logits[:, :0], a)
    p = logits.softmax(1)
    rcon = p.amax(1) * a[:, 0].sigmoid()
    tcon = p.gather(1, y[:, None])[:, 0]
    reference = torch.nn.functional.binary_cross_entropy(rcon, tcon, reduction="none")
    assert torch.allclose(RR().loss_per_image(out, y), reference, atol=1e-5)


@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("aux", [-500.0, 0.0, 500.0])
def test_rr_is_finite_with_a_saturated_softmax(y: int, aux: float) -> None:
    logits = torch.tensor([[1000.0, 0.0, -1000.0]], requires_grad=True)
    a = torch.tensor([[aux]], requires_grad=True)
    loss = RR(stop_con="none", stop_tcon=False).loss_per_image(
        Output(logits, logits[:, :0], a), torch.tensor([y])
    )
    grads = torch.autograd.grad(loss.sum(), (logits, a))
    assert loss.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


def test_the_loss_is_smallest_at_a_equal_to_tcon_over_con() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([1])
    p = logits.softmax(1)[0]
    best = p[1] / p[0]
    values = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    out = Output(logits.expand(99, 3), logits.new_zeros(99, 0), values.logit()[:, None])
    losses = RR().loss_per_image(out, y.expand(99))
    assert values[losses.argmin()].item() == pytest.approx(best.item(), abs=0.01)


def test_tau_scales_the_logits_of_the_rr_loss(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    net = ResNet8(4).build(Digits().domain, RR()).eval()
    out = net(x)
    batch_out = BatchOutputs(LabelledOutput(x, y, out))
    head = RR(tau=0.5)
    assert torch.allclose(
        head.auxiliary_loss(batch_out),
        RR().loss_per_image(out._replace(logits=2 * out.logits), y),
        atol=1e-6,
    )
    assert torch.equal(RR(weight=3.0).auxiliary_loss(batch_out), 3 * RR().loss_per_image(out, y))


def test_rr_with_con_stopped_has_no_gradient_to_the_classifier(
    batch: tuple[Tensor, Tensor],
) -> None:
    x, y = batch
    net = ResNet8(4).build(Digits().domain, RR()).train()
    RR(stop_con="all").loss_per_image(net(x), y).mean().backward()
    assert net.classify.weight.grad is None or not net.classify.weight.grad.any()
    stem = next(net.trunk.parameters())
    assert stem.grad is not None
    assert stem.grad.any()  # through A


# ------------------------------------------------------------------ variants

CONSTRUCTIONS: dict[str, Callable[[float, float], float]] = {
    "product": lambda con, a: con * a,
    "difference": lambda con, a: con - a,
    "aux": lambda con, a: a,
    "con": lambda con, a: con,
}


LOSSES: dict[str, Callable[[float, float, int], float]] = {
    "bce": lambda r, t, s: -t * math.log(r) - (1 - t) * math.log(1 - r),
    "squared": lambda r, t, s: (r - t) ** 2,
    "absolute": lambda r, t, s: abs(r - t),
    "margin": lambda r, t, s: max(0.0, 0.5 - s * (2 * r - 1)),
}


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_constructions_and_losses_equal_their_formulas(construction: str) -> None:
    out = outputs([[-1.0], [-3.0], [-2.0]])
    con, a = LOGITS.softmax(1).amax(1), out.aux[:, 0].sigmoid()
    expected = [
        CONSTRUCTIONS[construction](c, b) for c, b in zip(con.tolist(), a.tolist(), strict=True)
    ]
    assert certainty(out, construction).tolist() == pytest.approx(expected)  # type: ignore[arg-type]
    log_r, log_not = log_certainty(out, construction)  # type: ignore[arg-type]
    assert log_r.exp().tolist() == pytest.approx(expected)
    assert log_not.exp().tolist() == pytest.approx([1 - v for v in expected])
    target = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    for kind, loss in LOSSES.items():
        found = rr_loss_per_image(out, MIXED, target, construction, kind)  # type: ignore[arg-type]
        signs = (1, -1, -1)
        by_hand = [loss(r, t, s) for r, t, s in zip(expected, target.tolist(), signs, strict=True)]
        assert found.tolist() == pytest.approx(by_hand)


def test_every_loss_has_a_formula_here() -> None:
    assert set(LOSSES) == set(get_args(RRLossKind))


def test_a_negative_difference_has_a_gradient() -> None:
    aux = torch.tensor([[5.0]], dtype=torch.float64, requires_grad=True)  # A is about 1
    out = Output(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 0), aux)
    assert certainty(out, "difference").item() < LINEAR_BELOW
    target = torch.tensor([0.9], dtype=torch.float64)
    loss = rr_loss_per_image(out, torch.tensor([0]), target, "difference")
    (grad,) = torch.autograd.grad(loss.sum(), aux)
    assert loss.isfinite()
    assert grad.item() > 0  # descent makes A smaller


def test_the_default_construction_is_the_papers() -> None:
    out = outputs([[-1.0], [0.5], [4.0]])
    target = LOGITS.softmax(1)[torch.arange(3), MIXED]
    expected = -target * log_rcon(out) - (1 - target) * log_one_minus_rcon(out)
    assert torch.equal(RR().loss_per_image(out, MIXED), expected)


def test_rejectors_match_the_construction() -> None:
    assert RR(construction="difference", tau=0.5).rejectors()["R-Con"] == ConMinusRectifier(0.5)
    assert list(RR(construction="aux").rejectors()) == ["A"]
    assert list(RR(construction="con").rejectors()) == ["Con (trained)"]


def test_gradient_to_head_trains_the_head_alone(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    head = RR(gradient_to="head", features="all")
    net = ResNet8(4).build(Digits().domain, head).train()
    head.loss_per_image(net(x), y).mean().backward()
    for name, parameter in net.named_parameters():
        reached = parameter.grad is not None and bool(parameter.grad.any())
        assert reached == name.startswith("aux"), name
    net.eval()
    pixels = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(pixels).aux.sum(), pixels)
    assert gradient.any()  # in eval mode attacks have the gradient through A


def test_images_both_averages_clean_and_attacked_losses(batch: tuple[Tensor, Tensor]) -> None:
    clean, attacked = outputs([[0.3], [-1.0], [2.0]]), outputs([[0.0]] * 3, LOGITS * 2)
    head = RR(images="both", weight=3.0)
    batch_out = BatchOutputs(
        LabelledOutput(LOGITS, MIXED, attacked), LabelledOutput(LOGITS, MIXED, clean)
    )
    expected = 1.5 * (RR().loss_per_image(clean, MIXED) + RR().loss_per_image(attacked, MIXED))
    assert torch.allclose(head.auxiliary_loss(batch_out), expected)
