"""Frames and pairs: what is crafted, who gets gradients, batch-norm modes, parts of batches."""

import contextlib
import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from demur.attacks import CE, KL, PGD, WrongConfidence
from demur.attacks.objectives import AttackStart
from demur.balls import Linf
from demur.data import Digits, Images
from demur.errors import BadInput
from demur.methods import (
    ATRO,
    CARL,
    CCAT,
    EBD,
    FRAMEWORKS,
    HEADS,
    PGDAT,
    RR,
    SCHEDULES,
    TRADES,
    BatchOutputs,
    Framework,
    Head,
    LabelledOutput,
    Method,
    NoHead,
    OneCycle,
    Piecewise,
    SNet,
    Standard,
)  # fmt: skip
from demur.nets import RejectingNet, Small
from demur.output import Output, prediction
from demur.recipes import RECIPES
from demur.spec import show
from demur.training import check_divisible

AWAY = PGD(Linf(0.1), steps=2, start="near", objective=KL())
CALM = PGD(
    Linf(0.1), steps=2, start="mixed", objective=WrongConfidence(), momentum=0.9, backtrack=1.5
)
FRAME_EXAMPLES: tuple[Framework, ...] = (
    Standard(), PGDAT(PGD(Linf(0.1), steps=2)), TRADES(attack=AWAY), CCAT(attack=CALM),
)  # fmt: skip
HEAD_EXAMPLES: tuple[Head, ...] = (
    NoHead(), RR(), EBD(m_in=3.0, m_out=2.0), SNet(), ATRO(), CARL(),
)  # fmt: skip
OTHER_HEADS: tuple[Head, ...] = (
    RR(construction="difference", images="both"), RR(features="all", rr_loss="squared"),
    RR(joint=True), EBD(outside="attacked"), ATRO(form="authors"), CARL(form="authors"),
)  # fmt: skip
WIDTHS = {NoHead: 0, EBD: 0, SNet: 11}  # of the auxiliary output; 1 elsewhere


def test_every_frame_head_and_schedule_has_an_example() -> None:
    assert {type(f) for f in FRAME_EXAMPLES} == set(FRAMEWORKS)
    assert {type(h) for h in HEAD_EXAMPLES} == set(HEADS)
    assert set(SCHEDULES) == {Piecewise, OneCycle}


def test_the_papers_defaults() -> None:
    assert RR() == RR(weight=1.0, tau=1.0, stop_tcon=True, stop_con="correct")
    assert PGDAT() == PGDAT(PGD(Linf(8 / 255), steps=10, step_size=2 / 255), bn="train")


def test_trades_as_published() -> None:
    """Cross-entropy of the clean answer plus beta KL(clean || attacked), both sides learning."""
    g = torch.Generator().manual_seed(0)
    clean, attacked = (
        torch.randn(6, 4, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    y = torch.randint(0, 4, (6,), generator=g)
    none = torch.zeros(6, 0)
    seen = [LabelledOutput(none, y, Output(logits, none, none)) for logits in (attacked, clean)]
    each = TRADES(beta=6.0).classification_loss(BatchOutputs(seen[0], seen[1]))
    reference = torch.nn.functional.cross_entropy(clean, y, reduction="none")
    reference = reference + 6 * torch.nn.functional.kl_div(
        attacked.log_softmax(1), clean.softmax(1), reduction="none"
    ).sum(1)
    assert torch.allclose(each, reference)
    ours = torch.autograd.grad(each.sum(), (clean, attacked), retain_graph=True)
    theirs = torch.autograd.grad(reference.sum(), (clean, attacked))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    assert TRADES().attack == PGD(
        Linf(8 / 255), steps=10, step_size=2 / 255, start="near", objective=KL()
    )


def test_kl_is_nothing_at_the_clean_image_and_grows_away_from_it(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    (kept,) = KL().prepare(AttackStart(tiny_net, x, x, y, None))
    assert torch.allclose(KL()(tiny_net(x), y, kept), torch.zeros(len(x)), atol=1e-6)
    x_adv = AWAY(tiny_net, x, y)
    assert (KL()(tiny_net(x_adv), y, kept) > 1e-4).all()
    near = Linf(0.1).nearby(x, 1e-3, 0, torch.arange(len(x)), 0)
    assert 0 < (near - x).abs().amax() < 0.01


# ------------------------------------------------------------------ contracts


def pairs() -> list[tuple[Framework, Head]]:
    """Every frame with every head that it goes with, and other forms of heads in one frame."""
    found = []
    for framework, head in itertools.product(FRAME_EXAMPLES, HEAD_EXAMPLES):
        with contextlib.suppress(BadInput):
            found.append((Method(framework, head).framework, head))
    return found + [(FRAME_EXAMPLES[1], head) for head in OTHER_HEADS]


def test_most_pairs_go_together() -> None:
    assert len(pairs()) >= len(FRAME_EXAMPLES) * len(HEAD_EXAMPLES) - 6


@pytest.mark.parametrize(
    ("framework", "head"), pairs(), ids=lambda part: show(part).split("attack=")[0]
)
class TestContract:
    @pytest.fixture
    def net(self, head: Head) -> RejectingNet:
        return Small(4).build(Digits().domain, head).train()

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

    def test_the_same_step_gives_the_same_loss(
        self, framework: Framework, head: Head, batch: tuple[Tensor, Tensor]
    ) -> None:
        x, y = batch
        method, index = Method(framework, head), torch.arange(len(x))
        nets = [Small(4).build(Digits().domain, head).train() for _ in range(2)]
        losses = [method.loss(net, x, y, index, 5) for net in nets]
        assert torch.equal(*losses)

    @pytest.mark.parametrize("kind", ["right", "wrong"])
    def test_one_sided_batches_are_fine(
        self, framework: Framework, head: Head, net: RejectingNet, kind: str, test_images: Images
    ) -> None:
        x, _ = test_images.batch(slice(0, 8))
        with torch.no_grad():
            y = prediction(net(x))
        y = y if kind == "right" else (y + 1) % 10
        assert Method(framework, head).loss(net, x, y, torch.arange(8), 0).isfinite()

    def test_aux_width_is_the_heads(
        self, framework: Framework, head: Head, net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        assert net.eval()(batch[0]).aux.shape == (len(batch[0]), WIDTHS.get(type(head), 1))


@pytest.mark.parametrize(("bn", "updates"), [("train", 4), ("batch", 1), ("eval", 1)])
def test_batch_norm_mode_while_crafting(
    bn: Literal["train", "batch", "eval"], updates: int, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    net = Small(4).build(Digits().domain, RR()).train()
    framework = replace(PGDAT(PGD(Linf(0.1), steps=3)), bn=bn)
    Method(framework, RR()).loss(net, x, y, torch.arange(len(x)), 0)
    counted = {int(v) for k, v in net.state_dict().items() if k.endswith("num_batches_tracked")}
    assert counted == {updates}


def test_each_step_draws_its_own_start(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    net = Small(4).build(Digits().domain, NoHead()).eval()
    framework = PGDAT(PGD(Linf(0.1), steps=1), bn="eval")
    index = torch.arange(len(x))
    first = framework.craft(net, x, y, index, stream=0)
    assert not torch.equal(first, framework.craft(net, x, y, index, stream=1))
    assert torch.equal(first, framework.craft(net, x, y, index, stream=0))


# ------------------------------------------------------------------ images set apart


def test_images_set_apart_teach_the_head_alone_and_the_others_the_classifier_alone(
    batch: tuple[Tensor, Tensor],
) -> None:
    x, y = batch
    index = torch.arange(len(x))
    method = Method(Standard(), RR(gradient_to="head"), head_only=0.4)
    head_only_mask = method.head_only_mask(index)
    assert head_only_mask is not None
    assert 0 < head_only_mask.sum() < len(x)
    net = Small(4).build(Digits().domain, method.head).eval()  # no statistics between images
    outputs = method.outputs(net, x, x, y)
    each, extra = CE()(outputs.attacked.out, y), method.head.auxiliary_loss(outputs)
    assert extra is not None
    expected = each[head_only_mask == 0].mean() + extra[head_only_mask == 1].mean()
    assert torch.isclose(method.reduce_loss(outputs, head_only_mask), expected)


def test_the_same_images_are_set_apart_whatever_the_batch() -> None:
    method = Method(PGDAT(), RR(gradient_to="head"), head_only=0.2)
    whole = method.head_only_mask(torch.arange(5000))
    part = method.head_only_mask(torch.arange(2500, 2600))
    assert whole is not None
    assert part is not None
    assert torch.equal(whole[2500:2600], part)
    assert whole.mean().item() == pytest.approx(0.2, abs=0.02)
    assert Method(PGDAT(), RR()).head_only_mask(torch.arange(5)) is None


def test_a_batch_without_images_set_apart_is_fine(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    method = Method(Standard(), RR(gradient_to="head"), head_only=0.4)
    net = Small(4).build(Digits().domain, method.head).eval()
    outputs = method.outputs(net, x, x, y)
    for value in (0.0, 1.0):
        assert method.reduce_loss(outputs, torch.full((len(x),), value)).isfinite()


@pytest.mark.parametrize(
    ("head", "apart", "words"),
    [
        (RR(), 0.2, r"use head=RR\(gradient_to=head\)"),
        (EBD(), 0.2, "so it may not change the net"),
        (RR(gradient_to="head"), 1.0, "leaves the classifier no images"),
    ],
)
def test_what_cannot_be_set_apart_is_refused(head: Head, apart: float, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Method(PGDAT(), head, apart)


# ------------------------------------------------------------------ batches in parts


COUNTING = tuple(
    Method(Standard(), head)
    for head in (EBD(m_in=3.0, m_out=2.0), SNet(coverage=1.0), CARL(grad_penalty=1.0))
)


def apart(method: Method, images: Images) -> float:
    """How far the loss of a batch is from the mean of its halves'."""
    net = Small(4).build(Digits().domain, method.head).double().eval()  # no shared statistics
    x = images.batch(slice(0, 16))[0].double()
    right = prediction(net(x))
    y = torch.where(torch.arange(16) < 5, (right + 1) % 10, right)  # wrong ones in one half alone
    y[-1] = (y[-1] + 1) % 10  # and one in the other
    x_adv = method.craft(net, x, y, torch.arange(16), 0)
    parts = (slice(None), slice(0, 8), slice(8, 16))
    whole, first, second = (method.batch_loss(net, x[p], x_adv[p], y[p]) for p in parts)
    return abs((whole - (first + second) / 2).item())


BY_IMAGE = [method for pair in pairs() if (method := Method(*pair)).is_mean_over_images]


@pytest.mark.parametrize("method", BY_IMAGE, ids=show)
def test_a_loss_by_image_is_the_mean_of_its_parts(method: Method, test_images: Images) -> None:
    assert apart(method, test_images) < 1e-9


@pytest.mark.parametrize("method", COUNTING, ids=show)
def test_a_loss_that_counts_over_a_batch_is_not(method: Method, test_images: Images) -> None:
    assert not method.is_mean_over_images
    assert apart(method, test_images) > 1e-6


@pytest.mark.parametrize("name", ["digits-pgdat-snet", "digits-pgdat-ebd", "digits-ccat-rr"])
def test_what_counts_over_a_batch_is_not_shared_out_in_silence(name: str) -> None:
    with pytest.raises(BadInput, match="leave out --sync-bn if that is meant"):
        check_divisible(RECIPES[name], 2, sync_bn=True)
    check_divisible(RECIPES[name], 2, sync_bn=False)
    check_divisible(RECIPES[name], 1, sync_bn=True)
    check_divisible(RECIPES["digits-pgdat-rr"], 2, sync_bn=True)
