"""Square: schedule, patterns, verification, and strength against a peer."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from demur import noise
from demur.attacks import CE, AcceptedError, PlusLogScore, UntargetedMargin, square
from demur.attacks.attack_model import ObjectiveFunction, exact_value
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.square import Square, SquareDraw, _pattern
from demur.data import Images
from demur.errors import BadInput
from demur.output import Output, prediction
from demur.rejectors import RCon
from tests.approximate_model import ApproximateModel
from tests.linear import LinearNet, centred_images, distance
from tests.quick_net import QuickNet

aten = torch.ops.aten
BALLS = pytest.mark.parametrize("ball", [Linf(0.15), L2(1.0)], ids=repr)


def test_the_schedule_of_sides_does_not_depend_on_the_budget() -> None:
    x = torch.zeros(1, 3, 32, 32)
    for queries in (100, 5000):
        attack = Square(Linf(0.1), queries=queries)
        sides = [attack._side(x, query, 1) for query in (1, 11, 12, 52, 202, 502, 9000)]
        assert sides == [29, 29, 20, 14, 10, 7, 1]
        assert [attack._side(x, query, 3) for query in (1, 12, 9000)] == [29, 21, 3]


@pytest.mark.parametrize("side", [1, 2, 3, 5, 8])
def test_the_l2_pattern_is_two_bumps_of_opposite_sign(side: int) -> None:
    pattern = _pattern(side)
    assert pattern.shape == (side, side)
    assert pattern.norm().item() == pytest.approx(1)
    assert (pattern[: side // 2] > 0).all()
    assert (pattern[side // 2 :] < 0).all()


def test_windows_lie_inside_the_image_and_cover_every_pixel() -> None:
    x = torch.zeros(400, 1, 5, 6)
    uniforms = noise.uniform(0, torch.arange(400), 0, (6,))
    inside, rows, columns = SquareDraw(uniforms, x).window(1, 3)
    assert (inside.flatten(1).sum(1) == 9).all()
    assert inside.any(0).all()
    assert rows.max() == columns.max() == 2


@pytest.mark.parametrize("kind", [Linf, L2])
def test_never_succeeds_below_the_distance_of_a_linear_net(kind: type[Ball]) -> None:
    net, x = LinearNet(), centred_images(12)
    y = prediction(net(x))
    distances = distance(net, x, y, kind.__name__)
    eps = 0.99 * float(distances.median())
    success = prediction(net(Square(kind(eps), queries=200)(net, x, y))) != y
    assert not success[distances > eps].any()
    large = Square(kind(5 * float(distances.max())), queries=200)
    assert (prediction(net(large(net, x, y))) != y).float().mean() > 0.7


@BALLS
def test_more_queries_never_lower_the_objective(
    ball: Ball, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    few, more = (Square(ball, queries=n)(quick_net, x, y) for n in (10, 60))
    margins = [UntargetedMargin()(quick_net(images), y) for images in (few, more)]
    assert (margins[1] >= margins[0] - 1e-5).all()
    assert (margins[1] > margins[0] + 1e-5).any()


@dataclass
class CountingModel:
    """A model without gradients that counts the images of its forward passes."""

    net: QuickNet
    images: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.images += len(x)
        out: Output = self.net(x)
        return out.logits


def test_uses_forward_passes_only_and_successes_leave_the_batch(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    model = CountingModel(quick_net)
    Square(Linf(0.3), queries=30).perturb(model, x, y, torch.arange(len(x)))
    assert len(x) < model.images < 31 * len(x)
    wrong, model.images = (prediction(quick_net(x)) + 1) % 10, 0
    x_adv = Square(Linf(0.3), queries=30).perturb(model, x, wrong, torch.arange(len(x)))
    assert torch.equal(x_adv, x)
    assert model.images == len(x)


@BALLS
def test_the_verification_interval_does_not_change_the_result(
    ball: Ball, quick_net: QuickNet, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for interval in (1, square.VERIFY_EVERY, 1000):
        monkeypatch.setattr(square, "VERIFY_EVERY", interval)
        found.append(Square(ball, queries=70)(quick_net, *batch))
    success = prediction(quick_net(found[0])) != batch[1]
    assert success.any()
    assert not success.all()
    assert all(torch.equal(found[0], other) for other in found[1:])


class CountSynchronisations(TorchDispatchMode):
    """Count what makes the host wait for a GPU: reading a number, and indexing by a mask."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func.overloadpacket in (aten.index, aten.index_put_) else ()
        masks = any(index is not None and index.dtype == torch.bool for index in indices)
        self.count += masks or func.overloadpacket in (aten._local_scalar_dense, aten.nonzero)
        return func(*args, **(kwargs or {}))


@BALLS
def test_does_not_synchronise_between_verifications(
    ball: Ball, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    counts = []
    for queries in (1, square.VERIFY_EVERY, 3 * square.VERIFY_EVERY):
        with CountSynchronisations() as synchronisations:  # type: ignore[no-untyped-call]
            # CE itself does not synchronise; with eps = 0 each verification sees the same images.
            attack = Square(type(ball)(0.0), queries=queries, objective=CE())
            attack.perturb(ApproximateModel(quick_net, 0.1), *batch, batch[1])
        counts.append(synchronisations.count)
    assert 0 < counts[0] == counts[1] < counts[2]


@BALLS
def test_only_verified_successes_leave_the_batch(
    ball: Ball, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    model = ApproximateModel(quick_net, 0.5)
    once, later = (
        Square(ball, queries=n).perturb(model, x, y, torch.arange(len(x)))
        for n in (square.VERIFY_EVERY, 6 * square.VERIFY_EVERY)
    )
    candidate = prediction(model.approximate(once)) != y
    success, at_last = (prediction(quick_net(images)) != y for images in (once, later))
    assert torch.equal(later[candidate & success], once[candidate & success])
    refuted = candidate & ~success
    assert (later != once).flatten(1).any(1)[refuted].any(), "a refuted candidate goes on"
    assert at_last.sum() > success.sum()


@dataclass
class FalseSuccessModel(ApproximateModel):
    """Values are exact, but every image is a candidate success."""

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Output]:
        value, out = exact_value(self.net, objective, x, y, *inputs)
        return value, out._replace(logits=out.logits.scatter(1, y[:, None], -torch.inf))


@BALLS
def test_false_candidates_do_not_change_the_search(
    ball: Ball, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    index = torch.arange(len(x))
    expected, found = (
        Square(ball, queries=70).perturb(model, x, y, index)
        for model in (quick_net, FalseSuccessModel(quick_net, 0.0))
    )
    success = prediction(quick_net(expected)) != y
    assert success.any()
    assert torch.equal(prediction(quick_net(found)) != y, success)
    assert torch.equal(expected[~success], found[~success])


def test_accepts_any_objective_and_criterion(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    rule = AcceptedError(RCon(), 0.3)
    attack = Square(Linf(0.3), queries=60, objective=PlusLogScore(RCon(), eta=0.1), criterion=rule)
    successes = [int(rule(quick_net(images), y).sum()) for images in (x, attack(quick_net, x, y))]
    assert successes[1] > successes[0]


def test_another_ball_raises() -> None:
    with pytest.raises(BadInput, match="Linf, L2 or L1"):
        Square(type("Odd", (Ball,), dict.fromkeys(Ball.__abstractmethods__))(0.1))


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_is_as_strong_as_torchattacks(quick_net: QuickNet, test_images: Images, norm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks
    x, y = test_images.batch(slice(0, 50))
    model, ball = quick_net.classifier().eval(), Linf(0.15) if norm == "Linf" else L2(1.0)
    peer = torchattacks.Square(model, norm=norm, eps=ball.eps, n_queries=100, resc_schedule=False)
    with torch.random.fork_rng():
        theirs = peer(x, y)
    ours = Square(ball, queries=100)(quick_net, x, y)
    successes = [int((prediction(quick_net(images)) != y).sum()) for images in (ours, theirs)]
    assert successes[0] >= successes[1] - 2
