"""Frameworks with heads: losses, gradients, batch-norm modes, head-only subsets, split batches."""

import contextlib
import itertools
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from demur.attacks import CE, KL, PGD, WrongConfidence
from demur.attacks.attack_model import attack_model
from demur.attacks.balls import Linf
from demur.attacks.objectives.classification import AttackStart
from demur.data import Digits, Images
from demur.errors import BadInput
from demur.methods import (
    ATRO,
    CARL,
    EBD,
    FRAMEWORKS,
    HEADS,
    PGDAT,
    RR,
    TRADES,
    BatchOutputs,
    Framework,
    Head,
    LabelledOutput,
    Method,
    NoHead,
    Standard,
)  # fmt: skip
from demur.nets import RejectingNet, ResNet8
from demur.output import Output, prediction
from demur.spec import show

KL_PGD = PGD(Linf(0.1), steps=2, start="near", objective=KL())
CCAT_PGD = PGD(
    Linf(0.1), steps=2, start="mixed", objective=WrongConfidence(), momentum=0.9, backtrack=1.5
)


def with_short_attack(framework: Framework) -> Framework:
    """The framework with two steps of its attack, in the usual ball of the digits."""
    attack = getattr(framework, "attack", None)
    if not isinstance(attack, PGD):
        return framework
    changes: dict[str, Any] = {"attack": replace(attack, ball=Linf(0.1), steps=2, step_size=None)}
    return replace(framework, **changes)


FRAMEWORK_EXAMPLES = tuple(with_short_attack(cls()) for cls in FRAMEWORKS)
HEAD_EXAMPLES = tuple(cls() for cls in HEADS)
HEAD_VARIANTS: tuple[Head, ...] = (
    RR(construction="difference", images="both"), RR(features="all", rr_loss="squared"),
    RR(joint=True), EBD(outside="attacked"), ATRO(form="authors"), CARL(form="authors"),
)  # fmt: skip


def test_defaults_are_the_papers() -> None:
    assert RR() == RR(weight=1.0, tau=1.0, stop_tcon=True, stop_con="correct")
    assert PGDAT() == PGDAT(PGD(Linf(8 / 255), steps=10, step_size=2 / 255), bn="train")


def test_trades_loss_and_gradients_equal_the_published_formula() -> None:
    """CE(clean) + beta KL(clean || attacked), with gradients to both outputs."""
    g = torch.Generator().manual_seed(0)
    clean, attacked = (
        torch.randn(6, 4, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    y = torch.randint(0, 4, (6,), generator=g)
    empty = torch.zeros(6, 0)
    outputs = [LabelledOutput(empty, y, Output(z, empty, empty)) for z in (attacked, clean)]
    loss = TRADES(beta=6.0).classification_loss(BatchOutputs(outputs[0], outputs[1]))
    reference = torch.nn.functional.cross_entropy(clean, y, reduction="none")
    reference = reference + 6 * torch.nn.functional.kl_div(
        attacked.log_softmax(1), clean.softmax(1), reduction="none"
    ).sum(1)
    assert torch.allclose(loss, reference)
    ours = torch.autograd.grad(loss.sum(), (clean, attacked), retain_graph=True)
    theirs = torch.autograd.grad(reference.sum(), (clean, attacked))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    assert TRADES().attack == PGD(
        Linf(8 / 255), steps=10, step_size=2 / 255, start="near", objective=KL()
    )


def test_kl_is_zero_at_the_clean_image_and_positive_after_an_attack(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    (clean_log_p,) = KL().prepare(AttackStart(attack_model(tiny_net), x, x, y, None))
    assert torch.allclose(KL()(tiny_net(x), y, clean_log_p), torch.zeros(len(x)), atol=1e-6)
    x_adv = KL_PGD(tiny_net, x, y)
    assert (KL()(tiny_net(x_adv), y, clean_log_p) > 1e-4).all()
    near = Linf(0.1).start_near(x, 1e-3, 0, torch.arange(len(x)), 0)
    assert 0 < (near - x).abs().amax() < 0.01


# ------------------------------------------------------------------ contracts


def pairs() -> list[tuple[Framework, Head]]:
    """Every framework with every head that it accepts, and PGDAT with variants of heads."""
    found = []
    for framework, head in itertools.product(FRAMEWORK_EXAMPLES, HEAD_EXAMPLES):
        with contextlib.suppress(BadInput):
            found.append((Method(framework, head).framework, head))
    return found + [(FRAMEWORK_EXAMPLES[1], head) for head in HEAD_VARIANTS]


def test_most_frameworks_accept_most_heads() -> None:
    assert len(pairs()) >= len(FRAMEWORK_EXAMPLES) * len(HEAD_EXAMPLES) - 6


@pytest.mark.parametrize(
    ("framework", "head"), pairs(), ids=lambda part: show(part).split("attack=")[0]
)
class TestContract:
    @pytest.fixture
    def net(self, head: Head) -> RejectingNet:
        return ResNet8(4).build(Digits().domain, head).train()

    def test_loss_is_finite_and_gradients_reach_every_parameter(
        self, framework: Framework, head: Head, net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x, y = batch
        loss = Method(framework, head).loss(net, x, y, torch.arange(len(x)), 0)
        assert loss.shape == ()
        assert loss.isfinite()
        loss.backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        assert net.training

    def test_the_same_step_has_the_same_loss(
        self, framework: Framework, head: Head, batch: tuple[Tensor, Tensor]
    ) -> None:
        x, y = batch
        method, index = Method(framework, head), torch.arange(len(x))
        nets = [ResNet8(4).build(Digits().domain, head).train() for _ in range(2)]
        losses = [method.loss(net, x, y, index, 5) for net in nets]
        assert torch.equal(*losses)

    @pytest.mark.parametrize("kind", ["correct", "wrong"])
    def test_loss_is_finite_if_all_predictions_are_correct_or_all_wrong(
        self, framework: Framework, head: Head, net: RejectingNet, kind: str, test_images: Images
    ) -> None:
        x, _ = test_images.batch(slice(0, 8))
        with torch.no_grad():
            y = prediction(net(x))
        y = y if kind == "correct" else (y + 1) % 10
        assert Method(framework, head).loss(net, x, y, torch.arange(8), 0).isfinite()

    def test_the_auxiliary_output_has_the_columns_of_the_head(
        self, framework: Framework, head: Head, net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        out = net.eval()(batch[0])
        widths = [column.of(out)[0].numel() for column in head.columns]
        assert out.aux.shape == (len(batch[0]), sum(widths))
        assert all(r.column in (None, *head.columns) for r in head.rejectors().values())


@pytest.mark.parametrize(("bn", "updates"), [("train", 4), ("batch", 1), ("eval", 1)])
def test_running_statistics_are_updated_as_the_batch_norm_mode_says(
    bn: Literal["train", "batch", "eval"], updates: int, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    net = ResNet8(4).build(Digits().domain, RR()).train()
    framework = replace(PGDAT(PGD(Linf(0.1), steps=3)), bn=bn)
    Method(framework, RR()).loss(net, x, y, torch.arange(len(x)), 0)
    counts = {int(v) for k, v in net.state_dict().items() if k.endswith("num_batches_tracked")}
    assert counts == {updates}


def test_each_step_has_its_own_random_start(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    net = ResNet8(4).build(Digits().domain, NoHead()).eval()
    framework = PGDAT(PGD(Linf(0.1), steps=1), bn="eval")
    index = torch.arange(len(x))
    first = framework.craft(net, x, y, index, stream=0)
    assert not torch.equal(first, framework.craft(net, x, y, index, stream=1))
    assert torch.equal(first, framework.craft(net, x, y, index, stream=0))


# ------------------------------------------------------------------ head-only subset


def test_head_only_images_train_the_head_alone_and_the_others_the_classifier_alone(
    batch: tuple[Tensor, Tensor],
) -> None:
    x, y = batch
    index = torch.arange(len(x))
    method = Method(Standard(), RR(gradient_to="head"), head_only=0.4)
    head_only_mask = method.head_only_mask(index)
    assert head_only_mask is not None
    assert 0 < head_only_mask.sum() < len(x)
    net = (
        ResNet8(4).build(Digits().domain, method.head).eval()
    )  # in eval mode images do not interact
    outputs = method.outputs(net, x, x, y)
    loss, auxiliary = CE()(outputs.attacked.out, y), method.head.auxiliary_loss(outputs)
    assert auxiliary is not None
    expected = loss[head_only_mask == 0].mean() + auxiliary[head_only_mask == 1].mean()
    assert torch.isclose(method.reduce_loss(outputs, head_only_mask), expected)


def test_the_head_only_subset_does_not_depend_on_the_batch() -> None:
    method = Method(PGDAT(), RR(gradient_to="head"), head_only=0.2)
    whole = method.head_only_mask(torch.arange(5000))
    part = method.head_only_mask(torch.arange(2500, 2600))
    assert whole is not None
    assert part is not None
    assert torch.equal(whole[2500:2600], part)
    assert whole.mean().item() == pytest.approx(0.2, abs=0.02)
    assert Method(PGDAT(), RR()).head_only_mask(torch.arange(5)) is None


def test_loss_is_finite_if_a_batch_is_inside_or_outside_the_head_only_subset(
    batch: tuple[Tensor, Tensor],
) -> None:
    x, y = batch
    method = Method(Standard(), RR(gradient_to="head"), head_only=0.4)
    net = ResNet8(4).build(Digits().domain, method.head).eval()
    outputs = method.outputs(net, x, x, y)
    for value in (0.0, 1.0):
        assert method.reduce_loss(outputs, torch.full((len(x),), value)).isfinite()


@pytest.mark.parametrize(
    ("head", "head_only", "message"),
    [
        (RR(), 0.2, r"use head=RR\(gradient_to=head\)"),
        (EBD(), 0.2, "must not reach the backbone"),
        (RR(gradient_to="head"), 1.0, "leaves the classifier no images"),
    ],
)
def test_bad_head_only_subsets_raise(head: Head, head_only: float, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Method(PGDAT(), head, head_only)


# ------------------------------------------------------------------ split batches


def gap_to_halves(method: Method, images: Images) -> float:
    """Difference between the loss of a batch and the mean loss of its halves."""
    net = ResNet8(4).build(Digits().domain, method.head).double().eval()  # no batch statistics
    x = images.batch(slice(0, 16))[0].double()
    predicted = prediction(net(x))
    y = torch.where(torch.arange(16) < 5, (predicted + 1) % 10, predicted)  # five wrong
    y[-1] = (y[-1] + 1) % 10  # one wrong in the other half
    x_adv = method.craft(net, x, y, torch.arange(16), 0)
    parts = (slice(None), slice(0, 8), slice(8, 16))
    whole, first, second = (method.batch_loss(net, x[p], x_adv[p], y[p]) for p in parts)
    return abs((whole - (first + second) / 2).item())


PER_IMAGE_METHODS = [Method(PGDAT(), head) for head in (NoHead(), RR(), ATRO())]


@pytest.mark.parametrize("method", PER_IMAGE_METHODS, ids=show)
def test_a_mean_over_images_is_the_mean_of_its_halves(method: Method, test_images: Images) -> None:
    assert gap_to_halves(method, test_images) < 1e-9
