"""Any module on a GPU: captured copies, steps down, and everything left as found."""

import pytest
import torch
from torch import Tensor, nn

from demur.attacks import APGD, CE, Chain, Square
from demur.attacks.attack_model import PlainModel, checked
from demur.attacks.balls import Linf
from demur.audits.ensembles import AutoAttack
from demur.engine import FrozenModel, FrozenModule, accelerated, copies
from demur.engine.any_module import GPU_SETTINGS
from demur.engine.copies import FastCopy
from tests.test_any_module import Branching, Residual, ViewedMaps, conv_net, logits, seeded
from tests.test_gradients_together import OBJECTIVES, own_model
from tests.test_pure_bf16_copy import MODELS

COUNT = 100


@pytest.fixture
def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(COUNT, 1, 8, 8, generator=generator)
    return x.to(device), torch.randint(0, 4, (COUNT,), generator=generator).to(device)


def net_on(device: torch.device) -> nn.Module:
    return seeded(lambda: conv_net(Residual(8, 16), channels=16)).to(device)


def test_queries_of_every_size_are_those_of_the_model(
    device: torch.device, batch: tuple[Tensor, Tensor]
) -> None:
    net, said = net_on(device), list[str]()
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, COUNT, on_message=said.append) as fast,
    ):
        assert isinstance(fast.model, FrozenModule)
        assert (fast.model.fast.folded, fast.model.fast.settings.precision) == (3, "bf16")
        for size in (1, 30, 50, COUNT):
            ours = fast.gradient(CE(), x[:size], y[:size])
            plain = PlainModel(net).gradient(CE(), x[:size], y[:size])
            assert (ours.out.logits - plain.out.logits).abs().amax() < 0.05
            cosine = torch.cosine_similarity(ours.grad.flatten(1), plain.grad.flatten(1))
            assert cosine.median() > 0.99
            value, _ = fast.value(CE(), x[:size], y[:size])
            assert torch.allclose(value, ours.value, atol=0.02)
        assert len(fast.model.graphs.captured) == 8
    assert said == []


@pytest.mark.parametrize("tuned", [False, True])
def test_an_ensemble_agrees_with_the_plain_engine_and_leaves_all_as_found(
    device: torch.device, batch: tuple[Tensor, Tensor], tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", tuned)
    net, (x, y) = net_on(device), batch
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    correct = []
    for engine in ("plain", "auto"):
        attack = AutoAttack(net, eps=0.03, engine=engine, verbose=False)
        attack.chain = Chain((APGD(Linf(0.03), steps=20), Square(Linf(0.03), queries=100)))
        attack.names = ["apgd-ce", "square"]
        found = attack.run_standard_evaluation(x, y, bs=60)
        assert isinstance(found, Tensor)
        correct.append(logits(net, found).argmax(1) == y)
    assert int((correct[0] != correct[1]).sum()) <= 2
    assert torch.backends.cudnn.benchmark == tuned
    assert flags == (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state(device))


def test_what_cannot_be_captured_runs_eagerly_on_the_copy(
    device: torch.device, batch: tuple[Tensor, Tensor]
) -> None:
    net, said = seeded(Branching).to(device), list[str]()
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, COUNT, on_message=said.append) as fast,
    ):
        grad = fast.gradient(CE(), x, y).grad
        plain = PlainModel(net).gradient(CE(), x, y).grad
        assert torch.cosine_similarity(grad.flatten(1), plain.flatten(1)).median() > 0.99
    assert len(said) == 1


def test_a_model_that_needs_contiguous_maps_gets_them(
    device: torch.device, batch: tuple[Tensor, Tensor]
) -> None:
    net, said = seeded(ViewedMaps).to(device), list[str]()
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, COUNT, on_message=said.append) as fast,
    ):
        assert isinstance(fast.model, FrozenModule)
        assert not fast.model.fast.settings.channels_last
    assert len(said) == 1


def test_graphs_give_way_to_a_small_memory(
    device: torch.device, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, said = net_on(device), list[str]()
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, COUNT, on_message=said.append) as fast,
    ):
        assert isinstance(fast.model, FrozenModule)
        fast.gradient(CE(), x, y)
        fast.drop_graphs()
        assert len(fast.model.graphs.captured) == 1
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 100))
        fast.drop_graphs()
        assert len(fast.model.graphs.captured) == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_is_attacked_in_bf16_throughout(
    device: torch.device, batch: tuple[Tensor, Tensor], name: str
) -> None:
    net, said = seeded(MODELS[name]).to(device), list[str]()
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, COUNT, on_message=said.append) as fast,
    ):
        assert isinstance(fast.model, FrozenModule)
        assert fast.model.fast.settings.pure_bf16
        plain = PlainModel(net).gradient(CE(), x, y)
        for _ in range(2):  # the capture and a replay
            ours = fast.gradient(CE(), x, y)
            _, out = fast.value(CE(), x, y)
            scale = plain.out.logits.abs().amax()
            assert (ours.out.logits - plain.out.logits).abs().amax() < 0.05 * scale
            assert (out.logits - ours.out.logits).abs().amax() < 0.02 * scale
            cosine = torch.cosine_similarity(ours.grad.flatten(1), plain.grad.flatten(1))
            assert cosine.median() > 0.98
        assert len(fast.model.graphs.captured) == 2
    assert said == []


def test_a_transformer_whose_pure_bf16_copy_fails_gets_autocast(
    device: torch.device, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no bf16")

    monkeypatch.setattr(copies, "_cast_parameters", fail)
    net, said = seeded(MODELS["vit"]).to(device), list[str]()
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, COUNT, on_message=said.append) as fast,
    ):
        assert isinstance(fast.model, FrozenModule)
        assert fast.model.fast.settings == GPU_SETTINGS[0]
    assert [sentence.endswith("fails: no bf16") for sentence in said] == [True, True]


@pytest.mark.parametrize("make", [own_model, None], ids=["own", "any"])
def test_gradients_of_several_objectives_are_captured_together(
    device: torch.device, batch: tuple[Tensor, Tensor], make: type | None
) -> None:
    model: FrozenModel | FrozenModule
    if make is None:
        (x, y), net = batch, net_on(device)
        model = FrozenModule(net, FastCopy(net, GPU_SETTINGS[0], x[:2]), pytest.fail)
        model.graphs.set_max_batch(COUNT)
    else:
        model, x = make(device)
        y = torch.arange(len(x), device=device)
    for size in (len(x), 3):
        found = model.gradients(OBJECTIVES, x[:size], y[:size])
        for objective, query in zip(OBJECTIVES, found, strict=True):
            expected = model.gradient(objective, x[:size], y[:size])
            cosine = torch.cosine_similarity(query.grad.flatten(1), expected.grad.flatten(1))
            assert cosine.min() > 0.999
            assert torch.allclose(query.value, expected.value, atol=0.02)
    assert any(query == "gradients" for _, query, _ in model.graphs.captured)
    assert not model.graphs.eager
