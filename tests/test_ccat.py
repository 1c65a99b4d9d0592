"""CCAT: targets and losses by hand, both forms, and an attack that goes back when it lost."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor, nn

from demur import noise
from demur.attacks import CE, KL, PGD, FrankWolfe, Goal, Margin, WrongCon
from demur.attacks.momentum import ahead, begun, taken
from demur.balls import L2, Ball, Linf
from demur.bench import check
from demur.data import Digits, Images
from demur.errors import BadInput
from demur.gradient import gradient
from demur.methods import CCAT, RR, Method, Plain, Seen, Views
from demur.methods.ccat import OFFICIAL, REFERENCE
from demur.nets import RejectingNet, Small
from demur.output import Output, prediction
from demur.recipes import RECIPES
from tests.linear import LinearNet, centred_images

CPU = torch.device("cpu")
FORMS = {
    "official": CCAT(attack=replace(OFFICIAL, ball=Linf(0.1), steps=3, step=0.03)),
    "reference": CCAT(
        1.0, "reference", replace(REFERENCE, ball=Linf(0.1), steps=3, step=0.03), "train"
    ),
}  # fmt: skip
each_form = pytest.mark.parametrize("frame", FORMS.values(), ids=FORMS)


def seen(x: Tensor, logits: Tensor, y: Tensor) -> Seen:
    return Seen(x, y, Output(logits, logits[:, :0], logits[:, :0]))


# ------------------------------------------------------------------ by hand


@pytest.mark.parametrize(("rho", "half"), [(1.0, 0.5), (10.0, 1 - 0.5**10)])
def test_the_transition_at_nothing_half_and_the_whole_radius(rho: float, half: float) -> None:
    frame = CCAT(rho=rho)
    eps = 8 / 255
    delta = torch.zeros(4, 3, 2, 2, dtype=torch.float64)
    delta[1, 0, 0, 1], delta[2, 2, 1, 1], delta[3, 0, 0, 0] = eps / 2, -eps, 2 * eps
    assert frame.transition(delta).tolist() == pytest.approx([0, half, 1, 1], abs=1e-12)
    assert CCAT(attack=replace(OFFICIAL, ball=Linf(0))).transition(0 * delta).tolist() == 4 * [0]


def test_the_radius_is_that_of_the_ball() -> None:
    delta = torch.full((1, 1, 1, 4), 0.25, dtype=torch.float64)  # of length one half
    frame = CCAT(rho=1.0, attack=replace(OFFICIAL, ball=L2(2.0)))
    assert frame.transition(delta).tolist() == pytest.approx([0.25])


def three_classes(frame: CCAT) -> tuple[Views, Tensor, Tensor]:
    """Views of two images, the second of which moved by half the radius; both tables of logits."""
    eps = frame.attack.ball.eps
    before = torch.full((2, 1, 1, 2), 0.5, dtype=torch.float64)
    after = before.clone()
    after[1, 0, 0, 0] += eps / 2
    clean = torch.tensor([[1.0, 0, 0], [0, 0, 2.0]], dtype=torch.float64, requires_grad=True)
    attacked = torch.tensor([[0, 1.0, 0], [3.0, 0, 1]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 2])
    return Views(seen(after, attacked, y), seen(before, clean, y), before), clean, attacked


def test_the_official_loss_by_hand() -> None:
    frame = FORMS["official"]
    views, clean, attacked = three_classes(frame)
    gamma = 1 - 0.5**10
    p, q = clean.detach().log_softmax(1), attacked.detach().log_softmax(1)
    target = [gamma / 3, gamma / 3, 1 - gamma + gamma / 3]
    by_hand = [-p[0, 0], -p[1, 2], -q[0, 0], -sum(target[k] * q[1, k] for k in range(3))]
    assert frame.term(views).tolist() == pytest.approx([float(v) for v in by_hand])
    frame.term(views).sum().backward()
    assert attacked.grad is not None
    slope = q[1].exp() - torch.tensor(target, dtype=torch.float64)
    assert attacked.grad[1].tolist() == pytest.approx(slope.tolist())


def test_the_reference_loss_by_hand() -> None:
    frame = FORMS["reference"]
    views, clean, attacked = three_classes(frame)
    p, q = clean.detach().log_softmax(1), attacked.detach().log_softmax(1)
    target = [1 / 6, 1 / 6, 2 / 3]
    divergence = sum(t * (log(t) - float(q[1, k])) for k, t in enumerate(target))
    by_hand = [float(-p[0, 0] - q[0, 0]), float(-p[1, 2]) + divergence]
    assert frame.term(views).tolist() == pytest.approx(by_hand)
    frame.term(views).sum().backward()
    assert clean.grad is not None
    assert attacked.grad is not None
    assert clean.grad.isfinite().all()
    assert attacked.grad.isfinite().all()


def test_both_forms_have_the_gradient_of_a_divergence() -> None:
    """What the two losses differ by, no weight can change."""
    grads = []
    for form in ("official", "reference"):
        views, _, attacked = three_classes(replace(FORMS["reference"], form=form))
        (grad,) = torch.autograd.grad(
            replace(FORMS["reference"], form=form).term(views).sum(), attacked
        )
        grads.append(grad)
    assert torch.allclose(grads[0], grads[1])


def test_the_published_settings() -> None:
    assert CCAT().rho == 10
    assert CCAT().bn == "eval"
    assert CCAT().attack == PGD(
        Linf(8 / 255), steps=40, step=0.005, start="mixed", goal=WrongCon(), momentum=0.9,
        backtrack=1.5,
    )  # fmt: skip
    frame = RECIPES["cifar10-ccat-reference-rr"].method.frame
    assert frame == CCAT(1.0, "reference", REFERENCE, "train")
    assert (REFERENCE.backtrack_goal, REFERENCE.steps, REFERENCE.step) == (CE(), 20, 1 / 255)
    short = RECIPES["cifar10-ccat-reference-rr-short"].method.frame
    assert isinstance(short, CCAT)
    assert short.bn == "batch"
    assert RECIPES["cifar10-ccat-short"].method.frame == CCAT()


# ------------------------------------------------------------------ which images are seen


class Counting(nn.Module):
    """A net that notes the batches it is shown."""

    def __init__(self, net: RejectingNet) -> None:
        super().__init__()
        self.net, self.shown = net, list[Tensor]()

    def forward(self, x: Tensor) -> Output:
        self.shown.append(x.detach())
        out: Output = self.net(x)
        return out


@pytest.fixture
def net() -> RejectingNet:
    return Small(4).build(Digits().domain, RR()).train()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_official_form_attacks_the_second_half(
    count: int, net: RejectingNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, count))
    frame, index = FORMS["official"], torch.arange(count)
    x_adv = frame.crafted(net, x, y, index, 3)
    first, half = count // 2, (count + 1) // 2
    assert net.training
    assert torch.equal(x_adv[:first], x[:first])
    moved = Linf(0.1).size(x_adv - x)[first:]
    assert (moved > 0).any()
    assert moved.max() <= 0.1 + 1e-6
    counting = Counting(net)
    views = frame.views(counting, x, x_adv, y, clean=False)
    (joint,) = counting.shown
    assert torch.equal(joint, torch.cat([x[:half], x_adv[first:]]))
    assert views.clean is not None
    assert views.before is not None
    assert torch.equal(views.clean.y, y[:half])
    assert torch.equal(views.attacked.y, y[first:])
    assert torch.equal(views.before, x[first:])
    assert len(views.clean.out.logits) == len(views.attacked.out.logits) == half
    term = frame.term(views)
    assert len(term) == 2 * half
    wanted = 0.5 * (term[:half].mean() + term[half:].mean())
    assert Method(frame, Plain()).reduced(views).item() == pytest.approx(wanted.item())
    with_head = wanted + RR().term(views).mean()
    assert Method(frame, RR()).reduced(views).item() == pytest.approx(with_head.item(), rel=1e-6)


def test_the_reference_form_looks_twice_at_the_whole_batch(
    net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    frame = FORMS["reference"]
    x_adv = frame.crafted(net, x, y, torch.arange(len(x)), 3)
    counting = Counting(net)
    views = frame.views(counting, x, x_adv, y, clean=False)
    first, second = counting.shown
    assert torch.equal(first, x)
    assert torch.equal(second, x_adv)
    assert len(frame.term(views)) == len(x)


@each_form
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("head", [Plain(), RR()], ids=lambda head: type(head).__name__)
def test_any_batch_teaches_every_parameter(
    frame: CCAT, count: int, head: Plain | RR, test_images: Images
) -> None:
    if count == 1 and frame.form == "reference" and head != Plain():
        return  # batch norm of one feature has no statistics, whatever the frame
    net = Small(4).build(Digits().domain, head).train()
    x, y = test_images.batch(slice(0, count))
    loss = Method(frame, head).loss(net, x, y, torch.arange(count), 0)
    assert loss.isfinite()
    loss.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(("form", "updates"), [("official", 1), ("reference", 8)])
def test_how_often_running_statistics_move(
    form: str, updates: int, net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    """Crafted in eval mode, or three steps of two looks each, and then what teaches."""
    x, y = batch
    Method(FORMS[form], RR()).loss(net, x, y, torch.arange(len(x)), 0)
    counted = {int(v) for k, v in net.state_dict().items() if k.endswith("num_batches_tracked")}
    assert counted == {updates}


@each_form
def test_heads_that_do_not_go_with_it_are_refused(frame: CCAT) -> None:
    with pytest.raises(BadInput, match="crafted for its own goal"):
        frame.aimed(CE(), "eval")
    assert not frame.one_price_an_image


def test_an_attack_that_drops_images_is_refused_in_train_mode() -> None:
    with pytest.raises(BadInput, match="drops images"):
        CCAT(attack=PGD(Linf(0.1), keep="criterion"), bn="train")


# ------------------------------------------------------------------ the attack

BACK = PGD(Linf(0.1), steps=20, start="mixed", goal=WrongCon(), momentum=0.9, backtrack=1.5)


def worth(net: nn.Module, goal: Goal, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return goal(net(x), y)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_backtracking_never_ends_below_its_start_nor_below_plain_steps(
    momentum: float, tiny_net: RejectingNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 60))
    attack = replace(BACK, momentum=momentum, step=0.05)
    start = attack._start(x, torch.arange(len(x)), noise.derived(0, 0))
    found = worth(tiny_net, WrongCon(), attack(tiny_net, x, y), y)
    assert (found >= worth(tiny_net, WrongCon(), start, y)).all()
    plain = worth(tiny_net, WrongCon(), replace(attack, backtrack=0.0)(tiny_net, x, y), y)
    assert found.mean() >= plain.mean()
    more = worth(tiny_net, WrongCon(), replace(attack, steps=40)(tiny_net, x, y), y)
    assert (more >= found).all()


def test_backtracking_helps_where_steps_are_too_long(
    tiny_net: RejectingNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, 100))
    long = PGD(Linf(0.1), steps=12, step=0.2, start="clean", goal=CE(), backtrack=2.0)
    back = worth(tiny_net, CE(), long(tiny_net, x, y), y)
    plain = worth(tiny_net, CE(), replace(long, backtrack=0.0)(tiny_net, x, y), y)
    assert back.mean() > plain.mean()


def test_steps_by_hand(tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]) -> None:
    """The official climb written out, image by image."""
    x, y = batch
    attack = PGD(
        Linf(0.1), steps=6, step=0.04, start="clean", goal=WrongCon(), momentum=0.9, backtrack=1.5
    )
    found = attack(tiny_net, x, y)
    for i in range(4):
        one, label = x[i : i + 1], y[i : i + 1]
        at, mean, length = one, torch.zeros_like(one), 0.04
        for _ in range(6):
            grad, value, _ = gradient(tiny_net, WrongCon(), at, label)
            mean = 0.9 * mean + 0.1 * grad.sign()
            low, high = (one - 0.1).clamp_min(0), (one + 0.1).clamp_max(1)
            there = (at + length * mean).clamp(low, high)
            if worth(tiny_net, WrongCon(), there, label) >= value:
                at = there
            else:
                length /= 1.5
        assert torch.allclose(found[i : i + 1], at, atol=1e-6)


@pytest.mark.parametrize("ball", [Linf(0.5), L2(2.0)])
def test_the_first_step_with_momentum_is_a_tenth(ball: Ball) -> None:
    net, x = LinearNet(), centred_images(5)
    y = prediction(net(x))
    attack = PGD(ball, steps=1, step=0.02, start="clean", goal=Margin(), momentum=0.9)
    assert ball.size(attack(net, x, y) - x).tolist() == pytest.approx(5 * [0.002], rel=1e-6)
    plain = replace(attack, momentum=0.0)
    assert ball.size(plain(net, x, y) - x).tolist() == pytest.approx(5 * [0.02], rel=1e-6)


def test_directions_are_averaged() -> None:
    x = torch.full((1, 1, 1, 2), 0.5)
    climb = begun(x, 0.1, None)
    for grad, mean in (([3.0, -4.0], [0.1, -0.1]), ([2.0, 1.0], [0.19, 0.01])):
        slope = torch.tensor(grad).view(1, 1, 1, 2)
        x_next, found = ahead(Linf(1.0), x, climb, slope, 0.9)
        assert found.flatten().tolist() == pytest.approx(mean)
        assert x_next.flatten().tolist() == pytest.approx([0.5 + 0.1 * m for m in mean])
        climb = climb._replace(mean=found)


def test_a_tie_is_taken_and_a_strict_climb_shortens_it() -> None:
    x = torch.zeros(3, 1, 1, 1)
    value = torch.tensor([1.0, 1.0, 1.0])
    climb, there = begun(x, 0.3, value), x + 1
    after = taken(climb, there, torch.tensor([0.5, 1.0, 2.0]), 1.5, strict=True)
    assert after.x_adv.flatten().tolist() == [0, 1, 1]
    assert after.length.tolist() == pytest.approx([0.2, 0.2, 0.3])
    assert after.value.tolist() == [1, 1, 2]
    after = taken(climb, there, torch.tensor([0.5, 1.0, 2.0]), 1.5, strict=False)
    assert after.x_adv.flatten().tolist() == [0, 1, 1]
    assert after.length.tolist() == pytest.approx([0.2, 0.3, 0.3])
    assert taken(begun(x, 0.3, None), there, value, 1.5, strict=True).x_adv.all()


def test_a_goal_of_its_own_decides_what_is_taken_back(
    tiny_net: RejectingNet, test_images: Images
) -> None:
    """By cross-entropy the first step is taken whatever it does, and nothing after it loses."""
    x, y = test_images.batch(slice(0, 60))
    attack = replace(BACK, start="clean", step=0.05, backtrack_goal=CE())
    first = replace(attack, steps=1, backtrack=0.0, backtrack_goal=None)(tiny_net, x, y)
    assert torch.equal(replace(attack, steps=1)(tiny_net, x, y), first)
    values = [worth(tiny_net, CE(), replace(attack, steps=n)(tiny_net, x, y), y) for n in (1, 5, 9)]
    assert (values[1] >= values[0]).all()
    assert (values[2] >= values[1]).all()
    other = replace(attack, backtrack_goal=None)(tiny_net, x, y)
    assert not torch.equal(attack(tiny_net, x, y), other)


def test_restarts_are_chosen_by_what_decides_the_steps(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = replace(BACK, steps=4, backtrack_goal=CE(), start="random")
    few, more = attack(tiny_net, x, y), replace(attack, restarts=3)(tiny_net, x, y)
    assert (worth(tiny_net, CE(), more, y) >= worth(tiny_net, CE(), few, y) - 1e-6).all()


@pytest.mark.parametrize("goal", [None, KL()], ids=repr)
@pytest.mark.parametrize("start", ["mixed", "coin", "random"])
@pytest.mark.parametrize("ball", [Linf(0.1), L2(0.5)], ids=repr)
def test_it_does_not_depend_on_company_and_stays_in_the_ball(
    ball: Ball, start: str, goal: Goal | None, tiny_net: RejectingNet, test_images: Images
) -> None:
    attack = replace(BACK, ball=ball, steps=5, start=start, backtrack_goal=goal)  # type: ignore[arg-type]
    net, x = LinearNet().eval(), centred_images(9)
    y, index = prediction(net(x)), torch.arange(40, 49)
    whole = attack(net, x, y, index)
    assert torch.allclose(whole, attack(net, x.flip(0), y.flip(0), index.flip(0)).flip(0))
    assert torch.allclose(whole[4:5], attack(net, x[4:5], y[4:5], index[4:5]))
    assert torch.equal(whole, attack(net, x, y, index))
    x, y = test_images.batch(slice(0, 30))
    x_adv = attack(tiny_net, x, y)
    assert ball.size(x_adv - x).max() <= ball.eps * (1 + 1e-6) + 1e-7
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: replace(BACK, keep="criterion"), "use keep=largest"),
        (lambda: PGD(Linf(0.1), momentum=0.5, keep="criterion"), "use keep=largest"),
        (lambda: PGD(Linf(0.1), backtrack_goal=CE()), "without backtrack it does nothing"),
        (lambda: PGD(Linf(0.1), backtrack=0.5), "must be above 1"),
        (lambda: PGD(Linf(0.1), momentum=1.0), "no image ever moves"),
        (lambda: FrankWolfe(Linf(0.1), momentum=0.5), "use PGD"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(BadInput, match=words) as error:
        make()
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------ starts


@pytest.mark.parametrize("ball", [Linf(0.3), L2(0.3)], ids=repr)
def test_a_mixed_start_is_one_of_three(ball: Ball) -> None:
    x = torch.full((3000, 1, 6, 6), 0.5)
    delta = ball.mixed(x, 0, torch.arange(3000), 4) - x
    size = Linf(1).size(delta)
    none = size == 0
    assert none.float().mean().item() == pytest.approx(1 / 3, abs=0.03)
    spread = 0.3 / (2 * log(36))
    share = ball.size(delta)[~none] / 0.3
    coin = ball.ray_or_none(x, 0, torch.arange(3000), 4) - x
    heads = Linf(1).size(coin) > 0
    assert heads.float().mean().item() == pytest.approx(1 / 2, abs=0.03)
    rays = ball.size(coin)[heads] / 0.3
    assert rays.max() <= 1 + 1e-5
    assert rays.mean().item() == pytest.approx(1 / 2, abs=0.03)
    assert (rays < 0.1).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert share.max() <= 1 + 1e-5
    if isinstance(ball, Linf):  # normal noise has its largest pixel near 2.2 deviations
        lots = noise.uniform(0, torch.arange(3000), noise.derived(4, 2), (1,))[:, 0]
        little = delta[lots < 1 / 3]
        assert little.std().item() == pytest.approx(spread, rel=0.02)


def test_starts_are_drawn_anew_and_are_harmless_at_the_edges() -> None:
    x, index = torch.rand(4, 1, 1, 1), torch.arange(4)
    for ball in (Linf(0.0), L2(0.0)):
        for start in (ball.mixed, ball.ray_or_none):
            assert torch.allclose(start(x, 0, index, 0), x)
    wide = torch.full((50, 1, 4, 4), 0.5)
    for start in (Linf(0.1).mixed, Linf(0.1).ray_or_none):
        many, held = torch.arange(50), torch.full((1,), 7, dtype=torch.int64)
        assert not torch.equal(start(wide, 0, many, 0), start(wide, 0, many, 1))
        assert torch.equal(start(wide, 0, many, held), start(wide, 0, many, 7))


# ------------------------------------------------------------------ engines


@pytest.mark.parametrize("bn", ["train", "batch", "eval"])
@each_form
def test_engines_agree(frame: CCAT, bn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "STEPS", 3)
    made = check.recipe_of(Method(replace(frame, bn=bn), RR()), "fp64")  # type: ignore[arg-type]
    made = replace(made, net=Small(4), batch_size=65, epochs=1)
    found = check.equality(made, CPU, "none")
    assert found.holds, found
    assert found.allowed == 1e-9
