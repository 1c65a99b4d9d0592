"""CUDA graphs: replays with new inputs and weights, batch sizes, and memory that runs out."""

import copy

import pytest
import torch
from torch import Tensor

from demur.attacks import CE, UntargetedMargin
from demur.attacks.attack_model import attack_model
from demur.engine import FrozenModel, capture
from demur.engine.graphs import CapturedGraph
from demur.nets import RejectingNet
from demur.numerics import tf32
from demur.output import Output
from tests.gpu.tools import (
    BATCHES,
    GRADIENTS,
    OUTPUTS,
    change_weights,
    distance,
    images,
    random_net,
)

TOO_MUCH = 2**50  # bytes


def test_a_replay_reads_new_inputs_and_changed_tensors(device: torch.device) -> None:
    weight = torch.full((4,), 2.0, device=device)
    graph = CapturedGraph(lambda x: x * weight, torch.zeros(3, 4, device=device), tune=False)
    for step in range(3):
        x = torch.arange(12.0, device=device).view(3, 4) + step
        weight.fill_(step)
        assert torch.equal(graph(x), x * step)


def test_a_shorter_input_keeps_the_other_rows(device: torch.device) -> None:
    graph = CapturedGraph(lambda x: x + 1, torch.zeros(3, 2, device=device), tune=False)
    graph(torch.full((3, 2), 5.0, device=device))
    assert graph(torch.zeros(1, 2, device=device)).tolist() == [[1, 1], [6, 6], [6, 6]]


def test_the_capture_counts_once_per_replay(device: torch.device) -> None:
    """`prepare` undoes the warm-up; the capture itself runs nothing."""
    count = torch.zeros(1, device=device)
    graph, _ = capture(lambda: count.add_(1), prepare=count.zero_)
    assert float(count) == 0
    graph.replay()
    graph.replay()
    assert float(count) == 2


def assert_gradients_of(net: RejectingNet, frozen_model: FrozenModel, batch: int) -> None:
    x, y = images(torch.device("cuda"), batch, seed=batch)
    with tf32("fp32"):
        for objective in (CE(), UntargetedMargin()):
            ours = frozen_model.gradient(objective, x, y)
            plain = attack_model(net).gradient(objective, x, y)
            assert ours.grad.shape == x.shape
            assert distance(ours.grad, plain.grad) < GRADIENTS
            assert distance(ours.value, plain.value) < OUTPUTS
            value, out = frozen_model.value(objective, x, y)
            assert distance(value, plain.value) < OUTPUTS
            assert distance(out.aux, plain.out.aux) < OUTPUTS
        assert distance(frozen_model(x).logits, net(x).logits) < OUTPUTS


def test_captured_queries_follow_batch_sizes_and_weights(device: torch.device) -> None:
    net = random_net(device).eval().requires_grad_(False)
    frozen_model = FrozenModel(net, "fp32", "none", fixed=128, on_message=pytest.fail)
    for batch in (*BATCHES, 128, 3):
        assert_gradients_of(net, frozen_model, batch)
    captured = len(frozen_model.graphs.captured)
    assert captured > 0
    change_weights(net, seed=9)
    frozen_model.refresh()
    for batch in BATCHES:
        assert_gradients_of(net, frozen_model, batch)
    assert len(frozen_model.graphs.captured) == captured, (
        "a refresh writes into the captured weights"
    )


def test_a_batch_above_the_largest_keeps_its_size(device: torch.device) -> None:
    net = random_net(device).eval().requires_grad_(False)
    frozen_model = FrozenModel(net, "fp32", "none", fixed=32, on_message=pytest.fail)
    assert_gradients_of(net, frozen_model, 37)


def test_dropped_graphs_free_their_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = random_net(device).eval().requires_grad_(False)
    frozen_model = FrozenModel(net, "bf16", "none", fixed=128)
    x, y = images(device, 128)
    frozen_model.refresh()
    frozen_model.gradient(CE(), x, y)
    held = torch.cuda.memory_allocated()
    frozen_model.drop_graphs()
    assert torch.cuda.memory_allocated() == held  # there is memory for the next attack
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 100))
    frozen_model.drop_graphs()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < held
    frozen_model.gradient(CE(), x, y)


# ------------------------------------------------------------------ memory that runs out


def exhaust_memory_while_capturing(device: torch.device) -> None:
    if torch.cuda.is_current_stream_capturing():
        torch.empty(TOO_MUCH, dtype=torch.uint8, device=device)


def test_out_of_memory_during_a_capture_is_raised_and_the_device_stays_usable(
    device: torch.device,
) -> None:
    x = torch.ones(4, device=device)

    def work() -> Tensor:
        doubled = 2 * x
        exhaust_memory_while_capturing(device)
        return doubled

    with pytest.raises(torch.OutOfMemoryError):
        capture(work)
    assert float((x + 1).sum()) == 8
    graph, result = capture(lambda: 3 * x)
    x.fill_(2)
    graph.replay()
    assert result.tolist() == [6.0] * 4


class GreedyObjective:
    """Cross-entropy that exhausts the memory while it is captured."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        exhaust_memory_while_capturing(out.logits.device)
        return CE()(out, y)


def test_a_frozen_model_is_usable_after_memory_ran_out(device: torch.device) -> None:
    """The caller halves the batch; nothing of the failed capture remains."""
    net = random_net(device).eval().requires_grad_(False)
    frozen_model = FrozenModel(net, "fp32", "none", fixed=128, on_message=pytest.fail)
    x, y = images(device, 128)
    with pytest.raises(torch.OutOfMemoryError):
        frozen_model.gradient(GreedyObjective(), x, y)
    torch.cuda.empty_cache()
    frozen_model.set_max_batch(64)
    assert_gradients_of(net, frozen_model, 64)


def test_an_objective_that_cannot_be_captured_is_attacked_eagerly(device: torch.device) -> None:
    messages: list[str] = []
    net = random_net(device).eval().requires_grad_(False)
    frozen_model = FrozenModel(net, "fp32", "none", fixed=64, on_message=messages.append)

    def reads_the_device(out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        assert float(out.logits.abs().sum()) > 0  # a synchronisation, forbidden in a capture
        return CE()(out, y)

    x, y = images(device, 37)
    with tf32("fp32"):
        ours = frozen_model.gradient(reads_the_device, x, y)
        plain = attack_model(copy.deepcopy(net)).gradient(CE(), x, y)
    assert distance(ours.grad, plain.grad) < GRADIENTS
    (message,) = messages
    assert message.startswith("cannot compile this objective, attacking it eagerly: ")
    assert_gradients_of(net, frozen_model, 37)
