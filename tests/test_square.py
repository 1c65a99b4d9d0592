"""Square: its schedule, its patterns, what it may not break, and its strength beside a peer's."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from demur import noise
from demur.attacks import CE, AcceptedError, Evasion, LogitMargin, square
from demur.attacks.square import Draw, Square, _pattern
from demur.balls import L2, Ball, Linf
from demur.data import Images
from demur.errors import BadInput
from demur.gradient import ObjectiveFunction, exact_value
from demur.nets import RejectingNet
from demur.output import Output, prediction
from demur.rejectors import RCon
from tests.approximate_model import ApproximateModel
from tests.linear import LinearNet, centred_images, distance

aten = torch.ops.aten
BALLS = pytest.mark.parametrize("ball", [Linf(0.15), L2(1.0)], ids=repr)


def test_squares_shrink_by_a_schedule_that_knows_no_budget() -> None:
    x = torch.zeros(1, 3, 32, 32)
    for queries in (100, 5000):
        attack = Square(Linf(0.1), queries=queries)
        sides = [attack._side(x, query, 1) for query in (1, 11, 12, 52, 202, 502, 9000)]
        assert sides == [29, 29, 20, 14, 10, 7, 1]
        assert [attack._side(x, query, 3) for query in (1, 12, 9000)] == [29, 21, 3]


@pytest.mark.parametrize("side", [1, 2, 3, 5, 8])
def test_a_pattern_is_two_opposite_hills(side: int) -> None:
    pattern = _pattern(side)
    assert pattern.shape == (side, side)
    assert pattern.norm().item() == pytest.approx(1)
    assert (pattern[: side // 2] > 0).all()
    assert (pattern[side // 2 :] < 0).all()


def test_windows_lie_inside_and_reach_every_pixel() -> None:
    x = torch.zeros(400, 1, 5, 6)
    chances = noise.uniform(0, torch.arange(400), 0, (6,))
    inside, rows, columns = Draw(chances, x).window(1, 3)
    assert (inside.flatten(1).sum(1) == 9).all()
    assert inside.any(0).all()
    assert rows.max() == columns.max() == 2


def replace_eps(ball: Ball, share: float) -> Ball:
    return type(ball)(share * ball.eps)


@pytest.mark.parametrize("kind", [Linf, L2])
def test_it_never_breaks_a_linear_net_below_its_distance(kind: type[Ball]) -> None:
    net, x = LinearNet(), centred_images(12)
    y = prediction(net(x))
    least = distance(net, x, y, kind.__name__)
    eps = 0.99 * float(least.median())
    broken = prediction(net(Square(kind(eps), queries=200)(net, x, y))) != y
    assert not broken[least > eps].any()
    far = Square(kind(5 * float(least.max())), queries=200)
    assert (prediction(net(far(net, x, y))) != y).float().mean() > 0.7


@BALLS
def test_more_queries_break_no_fewer_and_never_lower_the_goal(
    ball: Ball, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    few, more = (Square(ball, queries=n)(tiny_net, x, y) for n in (10, 60))
    margins = [LogitMargin()(tiny_net(images), y) for images in (few, more)]
    assert (margins[1] >= margins[0] - 1e-5).all()
    assert (margins[1] > margins[0] + 1e-5).any()


@dataclass
class Counting:
    """A model that counts the images it is shown, and answers without a gradient."""

    net: RejectingNet
    seen: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.seen += len(x)
        out: Output = self.net(x)
        return out.logits


def test_it_asks_for_values_alone_and_broken_images_leave(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    model = Counting(tiny_net)
    Square(Linf(0.3), queries=30).perturb(model, x, y, torch.arange(len(x)))
    assert len(x) < model.seen < 31 * len(x)
    wrong, model.seen = (prediction(tiny_net(x)) + 1) % 10, 0
    x_adv = Square(Linf(0.3), queries=30).perturb(model, x, wrong, torch.arange(len(x)))
    assert torch.equal(x_adv, x)
    assert model.seen == len(x)


@BALLS
def test_how_long_a_device_is_asked_nothing_changes_nothing(
    ball: Ball,
    tiny_net: RejectingNet,
    batch: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for block in (1, 7, square.BLOCK, 1000):
        monkeypatch.setattr(square, "BLOCK", block)
        found.append(Square(ball, queries=130)(tiny_net, *batch))
    broken = prediction(tiny_net(found[0])) != batch[1]
    assert broken.any()
    assert not broken.all()
    assert all(torch.equal(found[0], other) for other in found[1:])


class Questions(TorchDispatchMode):
    """Counts what makes the host wait for a device: reading numbers, and indexing by a mask."""

    asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = args[1] if func.overloadpacket in (aten.index, aten.index_put_) else ()
        masks = any(place is not None and place.dtype == torch.bool for place in places)
        self.asked += masks or func.overloadpacket in (aten._local_scalar_dense, aten.nonzero)
        return func(*args, **(kwargs or {}))


@BALLS
def test_within_a_block_a_device_is_asked_nothing(
    ball: Ball, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    asked = []
    for queries in (1, square.BLOCK, 3 * square.BLOCK):
        with Questions() as questions:  # type: ignore[no-untyped-call]
            attack = Square(
                ball, queries=queries, objective=CE()
            )  # a goal that asks nothing either
            attack.perturb(ApproximateModel(tiny_net, 0.1), *batch, batch[1])
        asked.append(questions.asked)
    assert 0 < asked[0] == asked[1] < asked[2]


@BALLS
def test_only_what_is_broken_leaves_though_claims_are_rough(
    ball: Ball, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    model = ApproximateModel(tiny_net, 0.5)
    once, later = (
        Square(ball, queries=n).perturb(model, x, y, torch.arange(len(x)))
        for n in (square.BLOCK, 12 * square.BLOCK)
    )
    claimed = prediction(model.seen(once)) != y
    broken, at_last = (prediction(tiny_net(images)) != y for images in (once, later))
    assert torch.equal(later[claimed & broken], once[claimed & broken])
    whole = claimed & ~broken
    assert (later != once).flatten(1).any(1)[whole].any(), "a false claim ends nothing"
    assert at_last.sum() > broken.sum()


@dataclass
class Boaster(ApproximateModel):
    """Every value is right, and every image is said to be broken."""

    def value(
        self, objective: ObjectiveFunction, x: Tensor, y: Tensor, *given: Tensor
    ) -> tuple[Tensor, Output]:
        value, out = exact_value(self.net, objective, x, y, *given)
        return value, out._replace(logits=out.logits.scatter(1, y[:, None], -torch.inf))


@BALLS
def test_who_boasts_is_searched_as_if_nothing_had_been_claimed(
    ball: Ball, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    index = torch.arange(len(x))
    honest, boasting = (
        Square(ball, queries=130).perturb(model, x, y, index)
        for model in (tiny_net, Boaster(tiny_net, 0.0))
    )
    broken = prediction(tiny_net(honest)) != y
    assert broken.any()
    assert torch.equal(prediction(tiny_net(boasting)) != y, broken)
    assert torch.equal(honest[~broken], boasting[~broken])


def test_it_takes_any_goal_and_criterion(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    slips = AcceptedError(RCon(), 0.3)
    attack = Square(Linf(0.3), queries=60, objective=Evasion(RCon(), eta=0.1), criterion=slips)
    broken = [int(slips(tiny_net(images), y).sum()) for images in (x, attack(tiny_net, x, y))]
    assert broken[1] > broken[0]


def test_a_ball_it_has_no_squares_for_is_refused() -> None:
    with pytest.raises(BadInput, match="Linf and L2"):
        Square(type("Odd", (Ball,), dict.fromkeys(Ball.__abstractmethods__))(0.1))


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_it_is_as_strong_as_a_peers(tiny_net: RejectingNet, test_images: Images, norm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks
    x, y = test_images.batch(slice(0, 50))
    model, ball = tiny_net.classifier().eval(), Linf(0.15) if norm == "Linf" else L2(1.0)
    peer = torchattacks.Square(model, norm=norm, eps=ball.eps, n_queries=200, resc_schedule=False)
    with torch.random.fork_rng():
        theirs = peer(x, y)
    ours = Square(ball, queries=200)(tiny_net, x, y)
    broken = [int((prediction(tiny_net(images)) != y).sum()) for images in (ours, theirs)]
    assert broken[0] >= broken[1] - 2
