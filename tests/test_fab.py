"""FAB: its projections, the distances it finds, and its strength beside a peer's."""

import warnings

import pytest
import torch
from torch import Tensor

from demur.attacks import AcceptedError, MultiTarget
from demur.attacks.fab import FAB, SEARCHES, to_plane
from demur.balls import L2, Ball, Linf
from demur.data import Images
from demur.nets import RejectingNet
from demur.output import prediction
from demur.rejectors import RCon
from tests.approximate_model import ApproximateModel
from tests.linear import LinearNet, centred_images, distance

BALLS = pytest.mark.parametrize("ball", [Linf(0.12), L2(0.8)], ids=repr)


def random_plane(count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.rand(count, 1, 3, 3, generator=g, dtype=torch.float64)
    gradient_only = torch.randn(count, 1, 3, 3, generator=g, dtype=torch.float64)
    gradient_only[:, :, 0, 0] = 0  # a pixel that does not matter
    rise = 2 * torch.randn(count, generator=g, dtype=torch.float64)
    return x, gradient_only, rise


def reach(x: Tensor, gradient_only: Tensor, rise: Tensor) -> Tensor:
    """The most a linear function can rise, or fall, within the pixel range."""
    corner = torch.where(gradient_only * rise.sign().view(-1, 1, 1, 1) > 0, 1.0, 0.0)
    return ((corner - x) * gradient_only).flatten(1).sum(1)


@BALLS
def test_a_projection_lands_on_the_plane_inside_the_box(ball: Ball) -> None:
    x, gradient_only, rise = random_plane()
    delta = to_plane(ball, x, gradient_only, rise)
    most = reach(x, gradient_only, rise)
    wanted = torch.where(most.abs() < rise.abs(), most, rise)
    assert (most.abs() < rise.abs()).any(), "some planes lie outside the box"
    assert torch.allclose((delta * gradient_only).flatten(1).sum(1), wanted, atol=1e-12)
    assert (x + delta).min() >= -1e-15
    assert (x + delta).max() <= 1 + 1e-15
    assert (delta[gradient_only == 0] == 0).all()


@BALLS
def test_no_other_point_of_the_plane_is_closer(ball: Ball) -> None:
    """The optimum by bisection: the least t at which the best point of size t reaches the plane."""
    x, gradient_only, rise = random_plane()
    able = reach(x, gradient_only, rise).abs() > rise.abs()
    x, gradient_only, rise = x[able], gradient_only[able], rise[able]
    toward = gradient_only * rise.sign().view(-1, 1, 1, 1)
    low, high = torch.zeros_like(rise), torch.full_like(rise, 100.0)
    for _ in range(100):
        middle = (low + high) / 2
        speed = toward.sign() if isinstance(ball, Linf) else toward
        delta = (x + middle.view(-1, 1, 1, 1) * speed).clamp(0, 1) - x
        enough = (delta * toward).flatten(1).sum(1) >= rise.abs()
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    assert torch.allclose(to_plane(ball, x, gradient_only, rise), delta, atol=1e-9)


@BALLS
def test_nothing_moves_where_nothing_helps(ball: Ball) -> None:
    x, gradient_only, rise = random_plane(4)
    assert torch.equal(to_plane(ball, x, 0 * gradient_only, rise), torch.zeros_like(x))
    assert torch.equal(to_plane(ball, x, gradient_only, 0 * rise), torch.zeros_like(x))


@BALLS
def test_projections_side_by_side_are_each_their_own(ball: Ball) -> None:
    x, gradient_only, rise = (part.float() for part in random_plane())
    apart = torch.cat(
        (to_plane(ball, x, gradient_only, rise), to_plane(ball, 1 - x, gradient_only, -rise))
    )
    both = to_plane(
        ball, *map(torch.cat, ((x, 1 - x), (gradient_only, gradient_only), (rise, -rise)))
    )
    assert torch.equal(both, apart)


def assert_found(far: Tensor, least: Tensor) -> None:
    """Never below the closed form, and just above it where the pixel range does not cut in."""
    assert (far >= least * (1 - 1e-9)).all()
    inside = least < 0.8
    assert inside.any()
    assert (far[inside] <= 1.05 * least[inside]).all()


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_distance_of_a_linear_net(kind: type[Ball], seed: int) -> None:
    net, x = LinearNet(seed), centred_images(16, seed)
    y = prediction(net(x))
    least = distance(net, x, y, kind.__name__)
    x_adv = FAB(kind(0.01), steps=20, any_distance=True)(net, x, y)
    far = kind(0.01).size(x_adv - x)
    assert (prediction(net(x_adv)) != y).all()
    assert_found(far, least)


@pytest.mark.parametrize("kind", [Linf, L2])
def test_with_a_target_it_finds_the_distance_to_that_class(kind: type[Ball]) -> None:
    net, x = LinearNet(classes=2), centred_images(16)
    y = prediction(net(x))
    least = distance(net, x, y, kind.__name__)
    attack = FAB(kind(0.01), steps=20, any_distance=True)
    x_adv = attack.perturb(net, x, y, torch.arange(16), target=1 - y)
    assert_found(kind(0.01).size(x_adv - x), least)


@pytest.mark.parametrize("kind", [Linf, L2])
def test_of_all_targets_the_nearest_gives_the_distance(kind: type[Ball]) -> None:
    net, x = LinearNet(), centred_images(8)
    y = prediction(net(x))
    least = distance(net, x, y, kind.__name__)
    attack = FAB(kind(0.01), steps=20, any_distance=True)
    found = [
        kind(0.01).size(attack.perturb(net, x, y, y, target=(y + apart) % 4) - x)
        for apart in (1, 2, 3)
    ]
    assert_found(torch.stack(found).amin(0), least)


@pytest.mark.parametrize("kind", [Linf, L2])
def test_it_breaks_a_linear_net_exactly_when_the_ball_reaches(kind: type[Ball]) -> None:
    net, x = LinearNet(), centred_images(12)
    y = prediction(net(x))
    least = distance(net, x, y, kind.__name__)
    for eps in least.quantile(torch.tensor([0.0, 0.3, 0.7], dtype=torch.float64)).tolist():
        x_adv = FAB(kind(0.99 * eps), steps=20, restarts=2)(net, x, y)
        broken = prediction(net(x_adv)) != y
        assert not broken[least >= eps].any()
        assert broken[1.05 * least <= 0.99 * eps].all()
        assert torch.equal(x_adv[~broken], x[~broken]), "what is out of reach stays as it is"


@BALLS
def test_more_restarts_find_nothing_farther(
    ball: Ball, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch[0][:12], batch[1][:12]
    once, twice = (
        ball.size(FAB(ball, steps=5, restarts=n, any_distance=True)(tiny_net, x, y) - x)
        for n in (1, 2)
    )
    assert (twice <= once).all()
    assert (twice < once).any()


def test_what_is_wrong_as_it_stands_is_returned_as_it_is(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    y = (prediction(tiny_net(x)) + 1) % 10
    assert torch.equal(FAB(Linf(0.2), steps=2)(tiny_net, x, y), x)


def test_what_counts_as_broken_is_the_criterions_word(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    slips = AcceptedError(RCon(), 0.2)
    before = slips(tiny_net(x), y)
    x_adv = FAB(Linf(0.3), steps=6, criterion=slips)(tiny_net, x, y)
    moved = (x_adv != x).flatten(1).any(1)
    assert moved.any()
    assert torch.equal(slips(tiny_net(x_adv), y), moved | before)
    assert not (moved & before).any()


@BALLS
@pytest.mark.parametrize("any_distance", [False, True])
def test_what_it_returns_in_rough_arithmetic_is_broken(
    ball: Ball, any_distance: bool, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    model = ApproximateModel(tiny_net, 0.5)
    attack = FAB(ball, steps=8, restarts=2, any_distance=any_distance)
    x_adv = attack.perturb(model, x, y, torch.arange(len(x)))
    moved = (x_adv != x).flatten(1).any(1)
    assert moved.any()
    assert (prediction(tiny_net(x_adv)) != y)[moved].all()
    if not any_distance:
        assert ball.size(x_adv - x).max() <= ball.eps


@BALLS
def test_rough_arithmetic_costs_little_strength(
    ball: Ball, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    """At several times the error that 16 bits make of these logits."""
    x, y = batch
    attack = FAB(ball, steps=8, restarts=2)
    x_adv = attack.perturb(ApproximateModel(tiny_net, 0.1), x, y, torch.arange(len(x)))
    best = prediction(tiny_net(attack(tiny_net, x, y))) != y
    assert (prediction(tiny_net(x_adv)) != y).sum() >= best.sum() - 1


@BALLS
def test_only_claims_that_might_be_returned_are_looked_into(ball: Ball) -> None:
    """Out of reach nothing asks for the model's own answer; distances are searched by it."""
    net, x = LinearNet(), centred_images(12)
    y = prediction(net(x))
    model = ApproximateModel(net, 0.0)
    tight = type(ball)(0.5 * float(distance(net, x, y, type(ball).__name__).min()))
    assert torch.equal(FAB(tight, steps=10).perturb(model, x, y, y), x)
    assert model.asked == 0
    FAB(tight, steps=10, any_distance=True).perturb(model, x, y, y)
    assert model.asked >= len(x) * (1 + 2 + SEARCHES)


def test_the_nearest_of_many_targets_is_as_good_as_none(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    alone = FAB(Linf(0.2), steps=20)  # with far fewer a single target is not reached yet
    each = MultiTarget(alone, keep="success")
    broken = [(prediction(tiny_net(a(tiny_net, x, y))) != y).sum() for a in (alone, each)]
    assert broken[1] >= broken[0]


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_it_finds_images_as_close_as_a_peers(
    tiny_net: RejectingNet, test_images: Images, norm: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks
    x, y = test_images.batch(slice(0, 24))
    model, ball = tiny_net.classifier().eval(), Linf(0.12) if norm == "Linf" else L2(0.8)
    right = prediction(tiny_net(x)) == y
    with torch.random.fork_rng():
        theirs = torchattacks.FAB(model, norm=norm, eps=100.0, steps=12, n_classes=10)(x, y)
    ours = FAB(ball, steps=12, any_distance=True)(tiny_net, x, y)
    assert (prediction(tiny_net(ours)) != y).all()
    assert (prediction(tiny_net(theirs)) != y).all()
    far = [float(ball.size(images - x)[right].mean()) for images in (ours, theirs)]
    assert far[0] <= 1.03 * far[1]
