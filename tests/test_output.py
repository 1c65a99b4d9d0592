"""Certainty measures: definitions, exact log-space values, gradients that survive saturation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demur.errors import BadInput
from demur.output import Output, as_output, label_entry, mask_label, prediction
from demur.rejectors.certainty import (  # fmt: skip
    con,
    energy,
    log_con,
    log_one_minus_con,
    log_one_minus_rcon,
    log_rcon,
    rcon,
    tcon,
)


def made(logits: list[list[float]], aux: list[float] | None = None) -> Output:
    table = torch.tensor(logits, dtype=torch.float64)
    none = table.new_zeros(len(table), 0)
    return Output(table, none, none if aux is None else table.new_tensor(aux)[:, None])


def test_three_classes_by_hand() -> None:
    out = made([[2.0, 1.0, 0.0]], aux=[0.0])
    top = torch.e**2 / (torch.e**2 + torch.e + 1)
    assert con(out).item() == pytest.approx(top)
    assert rcon(out).item() == pytest.approx(top / 2)
    assert tcon(out, torch.tensor([2])).item() == pytest.approx(1 / (torch.e**2 + torch.e + 1))
    assert energy(out).item() == pytest.approx(torch.tensor([2.0, 1.0, 0.0]).logsumexp(0).item())
    assert prediction(out).tolist() == [0]


@given(st.floats(0.05, 20))
def test_temperature_divides_logits(tau: float) -> None:
    out, scaled = made([[2.0, 1.0, -1.0]], [0.3]), made([[2 / tau, 1 / tau, -1 / tau]], [0.3])
    assert con(out, tau).item() == pytest.approx(con(scaled).item())
    assert rcon(out, tau).item() == pytest.approx(rcon(scaled).item())
    assert energy(out, tau).item() == pytest.approx(tau * energy(scaled).item())


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=6), st.floats(-30, 30))
def test_log_complements_are_exact(logits: list[float], aux: float) -> None:
    out = made([logits], [aux])
    assert log_con(out).exp() + log_one_minus_con(out).exp() == pytest.approx(1)
    assert log_rcon(out).exp() + log_one_minus_rcon(out).exp() == pytest.approx(1)
    assert 0 <= rcon(out).item() <= con(out).item() <= 1


def test_when_right_tcon_is_con_and_when_wrong_it_is_below_doubt() -> None:
    out = made([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]])
    truth = tcon(out, torch.tensor([0, 1]))
    assert truth[0] == con(out)[0]
    assert truth[1] <= log_one_minus_con(out)[1].exp()


@pytest.mark.parametrize("size", [100.0, 1000.0])
def test_saturated_softmax_keeps_its_gradient(size: float) -> None:
    logits = torch.tensor([[size, 0.0, -size]], requires_grad=True)
    none = logits.new_zeros(1, 0)
    out = Output(logits, none, torch.tensor([[-size]], requires_grad=True))
    doubt = log_one_minus_con(out)
    (grad,) = torch.autograd.grad(doubt.sum(), logits)
    assert doubt.item() == pytest.approx(-size)
    assert grad[0].tolist() == pytest.approx([-1, 1, 0])
    (grad,) = torch.autograd.grad(log_rcon(out).sum(), out.aux)
    assert grad.item() == pytest.approx(1)  # the probability itself underflows here
    assert log_one_minus_rcon(out).isfinite().all()


def test_half_precision_logits_are_widened() -> None:
    out = Output(torch.tensor([[3.0, 1.0]]).bfloat16(), torch.zeros(1, 0), torch.zeros(1, 1))
    assert con(out).dtype == rcon(out).dtype == energy(out).dtype == torch.float32


def test_rcon_without_a_head_is_refused() -> None:
    with pytest.raises(BadInput, match="head=RR"):
        rcon(made([[1.0, 0.0]]))


def test_a_plain_tensor_is_taken_as_logits() -> None:
    out = as_output(torch.zeros(2, 3))
    assert out.logits.shape == (2, 3)
    assert out.aux.shape == out.feature.shape == (2, 0)
    with pytest.raises(BadInput, match="one row per image"):
        as_output(torch.zeros(3))


def test_the_second_entry_of_a_tuple_is_an_auxiliary_output_or_features() -> None:
    logits = torch.zeros(2, 3)
    assert as_output((logits, torch.ones(2, 1))).aux.tolist() == [[1.0], [1.0]]
    with_features = as_output((logits, torch.ones(2, 5)))
    assert (with_features.feature.shape, with_features.aux.shape) == ((2, 5), (2, 0))


def test_a_batch_of_one_stays_a_batch() -> None:
    out = made([[1.0, 0.0]], [0.0])
    assert con(out).shape == rcon(out).shape == energy(out).shape == (1,)


def test_the_entry_at_a_label_is_what_gather_takes_and_so_is_its_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    label = torch.randint(0, 7, (40,), generator=g)
    table = torch.randn(40, 7, generator=g).masked_fill(torch.rand(40, 7, generator=g) < 0.2, -9e9)
    table[0] = -torch.inf
    weights, found = torch.randn(40, generator=g), []
    for take in (label_entry, lambda table, label: table.gather(1, label[:, None])[:, 0]):
        given = table.clone().requires_grad_()
        taken = take(given, label)
        found.append((taken, *torch.autograd.grad((taken * weights)[1:].sum(), given)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_elsewhere_nothing_is_left_at_the_label() -> None:
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert mask_label(table, torch.tensor([2, 0])).tolist() == [
        [1.0, 2.0, -torch.inf], [-torch.inf, 5.0, 6.0],
    ]  # fmt: skip
