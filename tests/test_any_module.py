"""The engine on any module: faithful copies, sentences, and everything left as found."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import demur
from demur.attacks import APGD, CE, PGD, Chain, Square
from demur.attacks.attack_model import checked
from demur.attacks.balls import Linf
from demur.audits.ensembles import AutoAttack
from demur.engine import FrozenModule, accelerated, any_module
from demur.engine.any_module import CPU_SETTINGS, GPU_SETTINGS, _check_agreement, _expected
from demur.engine.copies import CannotCopy, CopySettings, FastCopy, check_copyable
from demur.errors import BadInput
from demur.output import Output, as_output

BF16 = CopySettings("bf16", channels_last=True)
FP32 = CopySettings("fp32", channels_last=True)


class Residual(nn.Module):
    """Convolution and batch norm with a shortcut."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer)
        self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, 2), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with random weights and batch norm statistics, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = build()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
                if module.affine:
                    module.weight.data.uniform_(0.5, 1.5)
                    module.bias.data.normal_(0, 0.2)
    return net.eval()


def conv_net(*middle: nn.Module, channels: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), *middle,
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 4),
    )  # fmt: skip


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(40, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 4, (40,), generator=generator)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return as_output(model(x)).logits


@pytest.mark.parametrize("settings", [*CPU_SETTINGS, *GPU_SETTINGS], ids=str)
def test_a_copy_has_the_outputs_and_gradients_of_the_model(
    settings: CopySettings, batch: tuple[Tensor, Tensor]
) -> None:
    net = seeded(lambda: conv_net(Residual(8, 16), channels=16))
    with checked(net, *batch) as (model, x, y):
        expected = _expected(model, x, y)
        fast = FastCopy(net, settings, x[:2])
        assert fast.folded == 3
        _check_agreement(fast, expected, x, y)
        if settings.precision == "fp32":
            assert torch.allclose(fast(x).logits, expected.out.logits, atol=1e-5)


def test_logits_of_a_bf16_copy_are_not_rounded(batch: tuple[Tensor, Tensor]) -> None:
    fast = FastCopy(seeded(conv_net), BF16, batch[0])
    found = fast(batch[0]).logits
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())


class NormReadTwice(nn.Module):
    """Reads the convolution before and after batch norm, so it must not be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 8), nn.BatchNorm2d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        out: Tensor = self.out((maps + self.norm(maps)).flatten(1))
        return out


class SharedConv(nn.Module):
    """Calls one convolution twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = (
            nn.Conv2d(1, 1, 3, 1, 1),
            nn.BatchNorm2d(1),
            nn.Linear(64, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.conv(self.conv(x))).flatten(1))
        return out


class InPlaceBetween(nn.Module):
    """Changes the output of a convolution in place before batch norm reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 8), nn.BatchNorm2d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.conv(x).relu_()).flatten(1))
        return out


@pytest.mark.parametrize("build", [NormReadTwice, SharedConv, InPlaceBetween])
def test_batch_norm_is_folded_only_where_that_changes_nothing(
    build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]
) -> None:
    net, x = seeded(build), batch[0]
    fast = FastCopy(net, FP32, x[:2])
    assert fast.folded == 0
    assert torch.allclose(fast(x).logits, logits(net, x), atol=1e-5)


def test_a_parallel_wrapper_is_left_out_of_the_copy(batch: tuple[Tensor, Tensor]) -> None:
    net = nn.Sequential(nn.DataParallel(seeded(conv_net)))
    fast = FastCopy(net, FP32, batch[0][:2])
    assert not any(isinstance(module, nn.DataParallel) for module in fast.net.modules())
    assert torch.allclose(fast(batch[0]).logits, logits(net, batch[0]), atol=1e-5)


class Uncopyable(nn.Sequential):
    def __deepcopy__(self, memo: Any) -> "Uncopyable":
        raise TypeError("no copies")


def hooked() -> nn.Module:
    net = conv_net()
    net[0].register_forward_hook(lambda *_: None)  # type: ignore[index]
    return net


def train_mode() -> nn.Module:
    net = seeded(conv_net)
    net[1].train()  # type: ignore[index]
    net.eval = lambda: net  # type: ignore[method-assign]
    return net


class Noisy(nn.Module):
    """Random by torch's or Python's generator."""

    def __init__(self, draw: Callable[[], float | Tensor]) -> None:
        super().__init__()
        self.net, self.draw = conv_net(), draw

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) + self.draw()
        return out


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (hooked, "it has hooks"),
    "train mode": (train_mode, "its batch norm uses the statistics of the batch"),
    "no statistics": (
        lambda: conv_net(nn.BatchNorm2d(8, track_running_stats=False)),
        "its batch norm uses the statistics of the batch",
    ),
    "scripted": (lambda: torch.jit.trace(conv_net().eval(), torch.rand(2, 1, 8, 8)), "TorchScript"),
    "float64": (lambda: conv_net().double(), "float32"),
    "bfloat16": (lambda: conv_net().bfloat16(), "float32"),
    "torch's generator": (lambda: Noisy(lambda: torch.rand(())), "it is random"),
    "a generator without effect": (lambda: Noisy(lambda: 0 * torch.rand(())), "it is random"),
    "Python's generator": (lambda: Noisy(random.random), "it is random"),
    "no copy": (lambda: Uncopyable(*conv_net()), "copy.deepcopy fails: no copies"),  # type: ignore[misc]
}


def randomness() -> tuple[Tensor, Any]:
    return torch.get_rng_state(), random.getstate()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_is_attacked_as_it_is_with_one_sentence(
    name: str, batch: tuple[Tensor, Tensor]
) -> None:
    build, reason = REFUSED[name]
    net = seeded(build)
    said: list[str] = []
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, 40, on_message=said.append) as fast,
    ):
        assert fast is model
    (sentence,) = said
    assert sentence.startswith("the fast engine cannot take this model: ")
    assert reason in sentence


def test_outputs_that_are_no_number_are_not_called_random(batch: tuple[Tensor, Tensor]) -> None:
    class NaNScore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(conv_net)

        def forward(self, x: Tensor) -> Output:
            logits = self.net(x)
            return Output(logits, logits[:, :0], logits[:, :1] * torch.nan)

    said: list[str] = []
    with (
        checked(NaNScore().eval(), *batch) as (model, x, y),
        accelerated(model, x, y, 40, on_message=said.append),
    ):
        assert said == []


def test_a_function_is_attacked_as_it_is(batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(CannotCopy, match=r"not an nn\.Module"):
        check_copyable(lambda x: x.flatten(1)[:, :4])


class ViewedMaps(nn.Module):
    """Fails on channels-last maps, which have no such view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, 1, 1), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.conv(x).view(len(x), -1))
        return out


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity (BPDA)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(Straight.apply(x))  # type: ignore[no-untyped-call]
        return out


class Branching(nn.Module):
    """Control flow that depends on the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x - 0.1 if x.mean() > 0.5 else x)
        return out


class InPlaceInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.sub_(0.5))
        return out


class Keywords(nn.Module):
    """Calls a layer with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.net = nn.Conv2d(1, 1, 3, 1, 1), conv_net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(self.conv(input=x))
        return out


class TupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.score = conv_net(), nn.Conv2d(1, 1, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.score(x).flatten(1)


def tied() -> nn.Module:
    first, second = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
    second.weight = first.weight
    return conv_net(first, nn.BatchNorm2d(8), second, nn.BatchNorm2d(8))


def eval_inside_train() -> nn.Module:
    net = nn.Sequential(seeded(conv_net))
    net.eval = lambda: net  # type: ignore[method-assign]
    return net


TAKEN: dict[str, Callable[[], nn.Module]] = {
    "view": ViewedMaps,
    "autograd function": WithFunction,
    "branch": Branching,
    "in place": InPlaceInput,
    "keywords": Keywords,
    "tuple": TupleOutput,
    "tied weights": tied,
    "outer train mode": eval_inside_train,
    "dropout": lambda: conv_net(nn.Dropout(0.5)),
    "groups": lambda: conv_net(nn.Conv2d(8, 8, 3, 1, 1, groups=4), nn.BatchNorm2d(8)),
    "no affine": lambda: conv_net(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, affine=False)),
    "weight norm": lambda: conv_net(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, 1, 1)), nn.BatchNorm2d(8)
    ),
    "group norm": lambda: conv_net(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)),
    "instance norm": lambda: conv_net(nn.InstanceNorm2d(8)),
    "frozen": lambda: conv_net().requires_grad_(False),
    "attention": lambda: conv_net(
        nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 16, batch_first=True),
        nn.Unflatten(2, (8, 8)),
    ),
}  # fmt: skip


def found_state(net: nn.Module) -> tuple[Any, ...]:
    """Everything of a module that an attack must leave as it is."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return (
        {name: (id(t), t.dtype, t.requires_grad, t.grad is None) for name, t in tensors.items()},
        [(id(m), m.training, sorted(vars(m))) for m in net.modules()],
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32,
        torch.get_rng_state().numpy().tobytes(), random.getstate(),
    )  # fmt: skip


class DrawsGlobally(nn.Module):
    """Draws from the global generators of Python, NumPy and torch, and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        torch.rand(1)
        return x.flatten(1)[:, :4]


def test_global_random_states_are_left_as_found(batch: tuple[Tensor, Tensor]) -> None:
    net = DrawsGlobally()
    before = found_state(net), np.random.get_state()[1].tolist()  # type: ignore[index]
    demur.attack(net, PGD(Linf(0.1), steps=2), *batch)
    assert before == (found_state(net), np.random.get_state()[1].tolist())  # type: ignore[index]


def test_a_model_without_weights_is_refused(batch: tuple[Tensor, Tensor]) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4, device="meta"))
    with pytest.raises(BadInput, match="load its weights first"):
        AutoAttack(net, eps=0.1, verbose=False).run_standard_evaluation(*batch)


@pytest.mark.parametrize("name", TAKEN)
def test_odd_models_are_attacked_on_a_copy_and_left_as_found(
    name: str, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is taken even if it is slow; a success is one of the model itself."""
    monkeypatch.setattr(any_module, "MAX_TIME_RATIO", 1e9)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    net, (x, y) = seeded(TAKEN[name]), batch
    said: list[str] = []
    before, weights = found_state(net), copy.deepcopy(net.state_dict())
    attack = APGD(Linf(0.1), steps=6)
    with (
        checked(net, x, y) as (model, images, labels),
        accelerated(model, images, labels, 40, on_message=said.append) as fast,
    ):
        assert isinstance(fast.model, FrozenModule)
        x_adv = attack.perturb(fast, images, labels, torch.arange(40))
    assert found_state(net) == before
    assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())
    plain = attack(net, x, y)
    broken, broken_plain = (logits(net, images.clone()).argmax(1) != y for images in (x_adv, plain))
    assert abs(int(broken.sum()) - int(broken_plain.sum())) <= 1
    assert len(said) == (name == "view")


def test_a_copy_with_other_gradients_is_not_used(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = seeded(conv_net)
    said: list[str] = []
    right = FastCopy.__call__
    monkeypatch.setattr(
        FastCopy,
        "__call__",
        lambda self, x: (
            right(self, x)._replace(logits=(o := right(self, x.flip(1)).logits) + 0 * o)
            if not x.requires_grad
            else right(self, x)._replace(logits=right(self, x.detach() + 0 * x.flip(2)).logits)
        ),
    )
    with (
        checked(net, *batch) as (model, x, y),
        accelerated(model, x, y, 40, on_message=said.append) as fast,
    ):
        assert fast is model
    assert [sentence.split(": ")[1] for sentence in said[:2]] == [
        "its gradients are not those of the model"
    ] * 2
    assert said[2].endswith("no copy of it agrees with it; attacking it as it is")


def test_auto_and_plain_agree_and_other_engines_do_not_exist(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_module, "MAX_TIME_RATIO", 1e9)
    net, (x, y) = seeded(lambda: conv_net(Residual(8, 16), channels=16)), batch
    monkeypatch.setattr(any_module, "MIN_TRIAL_QUERIES", 1)
    for attack in (APGD(Linf(0.05), steps=10), Square(Linf(0.05), queries=50)):
        plain, fast = (
            demur.attack(net, attack, x, y, engine=engine) for engine in ("plain", "auto")
        )
        assert torch.equal(plain, attack(net, x, y))
        assert torch.equal(logits(net, plain).argmax(1) == y, logits(net, fast).argmax(1) == y)
    for call in (
        lambda: demur.attack(net, PGD(Linf(0.1)), x, y, engine="fast"),
        lambda: AutoAttack(net, engine="quick"),
    ):
        with pytest.raises(BadInput, match="the engine must be auto or plain, not"):
            call()


def test_autoattack_takes_the_copy(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_module, "MAX_TIME_RATIO", 1e9)
    calls, own = [0], FastCopy.__call__

    def counted(self: FastCopy, x: Tensor) -> Output:
        calls[0] += 1
        return own(self, x)

    monkeypatch.setattr(FastCopy, "__call__", counted)
    for engine in ("plain", "auto"):
        attack = AutoAttack(
            seeded(conv_net), eps=0.01, version="custom", attacks_to_run="apgd-ce", verbose=False,
            engine=engine,
        )  # fmt: skip
        attack.chain = Chain((APGD(Linf(0.01), steps=10),))
        attack.run_standard_evaluation(batch[0][:8], batch[1][:8])
        assert (calls[0] > 10) == (engine == "auto")


def test_no_trial_where_it_cannot_pay(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_module, "FastCopy", pytest.fail)
    demur.attack(seeded(conv_net), PGD(Linf(0.1), steps=3), *batch)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    demur.attack(linear, APGD(Linf(0.1)), *batch)


def test_value_queries_need_no_gradient(batch: tuple[Tensor, Tensor]) -> None:
    net = seeded(conv_net)
    frozen = FrozenModule(net, FastCopy(net, FP32, batch[0]), pytest.fail)
    value, out = frozen.value(CE(), *batch)
    assert not value.requires_grad
    assert torch.allclose(out.logits, logits(net, batch[0]), atol=1e-5)
