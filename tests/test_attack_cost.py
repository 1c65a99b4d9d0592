"""What attacks cost: host synchronisations, the CPU trial, TorchScript, the FAB projection."""

import pytest
import torch
from torch import Tensor, nn

from demur.attacks import FAB, MultiTarget, Square
from demur.attacks.attack_model import PlainModel, checked
from demur.attacks.balls import Linf
from demur.attacks.fab import newton_time, sorted_time
from demur.attacks.square import SquareDraw
from demur.engine import FrozenModule, accelerated, any_module
from demur.engine.copies import CopySettings, FastCopy
from tests.approximate_model import ApproximateModel
from tests.test_square import CountSynchronisations

COUNT = 6


def small_net() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(64, 4),
        )  # fmt: skip
    return net.eval()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    x = torch.rand(COUNT, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, small_net()(x).argmax(1)


def synchronisations(attack: FAB | Square | MultiTarget, batch: tuple[Tensor, Tensor]) -> int:
    # The values of the approximate model are exact; eps = 0 keeps every image until the end.
    model = ApproximateModel(small_net(), 0.0)
    with CountSynchronisations() as counted:  # type: ignore[no-untyped-call]
        attack.perturb(model, *batch, torch.arange(COUNT))
    return int(counted.count)


def test_steps_of_fab_between_verifications_do_not_synchronise(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU the projection sorts; Newton's method reads its progress, which is free on a CPU.
    monkeypatch.setattr("demur.attacks.fab.newton_time", sorted_time)
    few, many = (synchronisations(FAB(Linf(0.0), steps=steps), batch) for steps in (2, 9))
    assert 0 < few == many
    longer = synchronisations(FAB(Linf(0.0), steps=29), batch)
    assert longer - many <= 2 * 5, "one verification for ten steps"


def test_the_square_of_a_proposal_is_the_window(batch: tuple[Tensor, Tensor]) -> None:
    uniforms = torch.rand(COUNT, 6, generator=torch.Generator().manual_seed(1))
    uniforms[0] = 1 - 2**-24  # the last corner
    draw = SquareDraw(uniforms, batch[0])
    for side in (1, 3, 4):
        inside, _, _ = draw.window(0, side)
        positions = draw.pixels(side)
        pixels = torch.zeros(COUNT, 1, 16, dtype=torch.bool).scatter(2, positions, True)
        assert torch.equal(pixels.view(COUNT, 1, 4, 4), inside)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7, 0.999, 1.0, 1.5])
def test_newton_finds_the_stopping_time(share: float) -> None:
    generator = torch.Generator().manual_seed(2)
    gain, stop = (torch.rand(9, 50, generator=generator).double() for _ in range(2))
    gain[0], stop[1, :30], gain[2, ::2] = 0, 0, 0
    rise = share * (gain * stop).sum(1, keepdim=True)
    found = newton_time(gain, stop, rise)
    moved = (gain * stop.minimum(found)).sum(1, keepdim=True)
    assert torch.allclose(moved, rise.minimum((gain * stop).sum(1, keepdim=True)), atol=1e-12)
    reachable = (gain.sum(1) > 0) & (share < 1)
    assert torch.allclose(found[reachable], sorted_time(gain, stop, rise)[reachable], atol=1e-9)


class Branching(nn.Sequential):
    """Another map for bright images."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return 2 * logits if bool(x.mean() > 0.9) else logits


class FixedBatch(nn.Sequential):
    """A constant made for the number of images that it was traced with."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return logits + torch.zeros(int(x.shape[0]), 1)


class TestScript:
    def test_has_the_outputs_of_the_copy(self, batch: tuple[Tensor, Tensor]) -> None:
        x, _ = batch
        copy = FastCopy(small_net(), CopySettings("fp32", channels_last=True), x[:2])
        expected = copy(x).logits
        assert copy.script(x)
        with torch.no_grad():
            for part in (x, x[:1], x.repeat(3, 1, 1, 1)):
                assert torch.allclose(copy(part).logits, small_net()(part), atol=1e-5)
        images = x.clone().requires_grad_()
        torch.autograd.grad(copy(images).logits.sum(), images)  # gradients still exist
        assert torch.allclose(copy(images).logits, expected)

    @pytest.mark.parametrize("kind", [Branching, FixedBatch])
    def test_is_not_used_where_it_may_differ(
        self, kind: type[nn.Sequential], batch: tuple[Tensor, Tensor]
    ) -> None:
        x, _ = batch
        net = kind(*small_net().children()).eval()
        copy = FastCopy(net, CopySettings("fp32", channels_last=False), x[:2])
        assert not copy.script(x)
        with torch.no_grad():
            assert torch.allclose(copy(x).logits, net(x), atol=1e-5)

    def test_is_made_after_many_forward_passes_and_finds_the_same(
        self, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(any_module, "MAX_TIME_RATIO", 1e9)
        monkeypatch.setattr(any_module, "SCRIPT_AFTER", 5)
        net, attack = small_net(), Square(Linf(0.1), queries=60)
        with checked(net, *batch) as (model, x, y), accelerated(model, x, y, COUNT) as fast:
            assert isinstance(fast.model, FrozenModule)
            found = attack.perturb(fast, x, y, torch.arange(COUNT))
            assert fast.model.fast._scripted is not None
        plain = attack(PlainModel(net), *batch)
        assert torch.equal(net(found).argmax(1) == batch[1], net(plain).argmax(1) == batch[1])


def test_the_fastest_copy_wins_the_trial(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    spent = {"model": 3.0, "channels-last": 2.0, "contiguous": 1.0}
    now = 0.0

    def process_time() -> float:
        nonlocal now
        tick = next(clock)
        if tick % 2:  # the end of a measurement; the model, channels-last, contiguous in turn
            now += list(spent.values())[tick // 2 % 3]
        return now

    monkeypatch.setattr("time.process_time", process_time)
    for wanted in ("contiguous", "channels-last", "model"):
        spent |= {name: 1.0 if name == wanted else 2.0 for name in spent}
        clock = iter(range(10**6))
        with checked(small_net(), *batch) as (model, x, y), accelerated(model, x, y, COUNT) as fast:
            chosen = fast.model
        if wanted == "model":
            assert not isinstance(chosen, FrozenModule)
        else:
            assert isinstance(chosen, FrozenModule)
            assert wanted in str(chosen.fast.settings)
