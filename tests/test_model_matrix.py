"""Every attack on odd models, dtypes and images: a right result or one sentence.

Whatever happens, the model, the images, torch's random state and the grad mode stay as they were.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur.attacks import (
    APGD,
    ATTACKS,
    CW,
    EOTPGD,
    FAB,
    PGD,
    AcceptedError,
    Attack,
    AutoAttackEnsemble,
    Chain,
    Clean,
    Corruption,
    Ensemble,
    ForceRejectionEnsemble,
    FrankWolfe,
    HopSkipJump,
    MaxMinMargin,
    MeanChain,
    MinMargin,
    MultiTarget,
    OrthogonalAPGD,
    RayS,
    RejectAutoAttackEnsemble,
    Rejected,
    Square,
    TargetedMargin,
    WorstScore,
)
from demur.attacks.attack_model import CheckedModel
from demur.attacks.balls import L2, Linf
from demur.attacks.wrappers import ModelWithScore
from demur.audits.ensembles import AutoAttack, RejectAutoAttack
from demur.audits.masking import SURROGATE, OnMasking
from demur.errors import BadInput
from demur.output import Output, as_output
from demur.rejectors import Con, ModelScore
from tests.test_square import CountSynchronisations

BALL, RULE = Linf(0.1), AcceptedError(Con(), 0.3)
COUNT, CLASSES, SHAPE = 6, 4, (1, 4, 4)


def small(attack: Attack) -> Attack:
    """The attack with few steps; an ensemble as its chain."""
    if isinstance(attack, Ensemble):
        return small(attack.chain())
    if isinstance(attack, Chain):
        return replace(attack, attacks=tuple(small(part) for part in attack.attacks))
    if isinstance(attack, MultiTarget):
        return replace(attack, attack=small(attack.attack), targets=1)
    limits = {"steps": 2, "queries": 3, "searches": 1}
    if isinstance(attack, MaxMinMargin | FAB):
        limits["restarts"] = 1
    changes: dict[str, Any] = {name: n for name, n in limits.items() if hasattr(attack, name)}
    return replace(attack, **changes)


def few_queries(on_masking: OnMasking) -> OnMasking:
    """The members that read decisions, with a budget that takes no time."""
    found = {name: one for name, one in on_masking.attacks.items() if name != SURROGATE}
    on_masking.attacks = {name: small(one) for name, one in found.items()}
    return on_masking


SPECS: tuple[Attack, ...] = (
    Clean(), PGD(BALL, restarts=2), FrankWolfe(BALL, keep="success"),
    MultiTarget(PGD(L2(0.5), objective=TargetedMargin())), APGD(BALL, restarts=2),
    MaxMinMargin(BALL, RULE), OrthogonalAPGD(BALL, objective=MinMargin(RULE), criterion=RULE),
    EOTPGD(BALL), WorstScore(BALL, Con()), MeanChain((EOTPGD(BALL),)),
    FAB(BALL), Square(L2(0.5)), HopSkipJump(L2(0.5)), RayS(BALL), CW(),
    Chain((FAB(BALL), Square(BALL))), AutoAttackEnsemble(BALL),
    RejectAutoAttackEnsemble(BALL, RULE), ForceRejectionEnsemble(BALL, Rejected(Con(), 0.3)),
    Corruption(),
)  # fmt: skip
SMALL = {type(spec).__name__: small(spec) for spec in SPECS}
NEEDS_NO_GRADIENT = ("Clean", "Square", "HopSkipJump", "RayS")
every_attack = pytest.mark.parametrize("name", SMALL)


class Net(nn.Module):
    """A small net with batch norm and dropout; `before` and `after` change images and logits."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.drop, self.fc = nn.Dropout(0.2), nn.Linear(64, CLASSES)
        self.eval()

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        return logits

    def forward(self, x: Tensor) -> Tensor:
        logits = self.fc(self.drop(self.norm(self.conv(self.before(x))).relu()).flatten(1))
        return self.after(3 * logits, x)


class InPlace(Net):
    def before(self, x: Tensor) -> Tensor:
        x.data.add_(0.2)  # torch's version counter does not see this
        return x.mul_(0.5)


class NotInPlace(Net):
    def before(self, x: Tensor) -> Tensor:
        return (x + 0.2) * 0.5


class NaNLogits(Net):
    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        return logits * torch.where(x[:, :1, 0, 0] > 0.5, torch.nan, 1.0)


class NaNGradient(Net):
    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        zero = (x - x.detach()).flatten(1).sum(1, keepdim=True).abs()  # sqrt has slope inf here
        return logits + zero.sqrt()


class OneRow(Net):
    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        return logits[:1]


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.rand(COUNT, *SHAPE, generator=g)
    return x, Net()(x).argmax(1)


def snapshot(net: nn.Module, x: Tensor, y: Tensor) -> list[object]:
    """Everything that an attack must leave as it was."""
    modules = [(m.training, len(m._forward_hooks)) for m in net.modules()]
    parameters = [
        (name, p.requires_grad, None if p.grad is None else p.grad.tolist())
        for name, p in net.named_parameters()
    ]
    tensors = {name: (part.dtype, part.tolist()) for name, part in net.state_dict().items()}
    given = (x.tolist(), x.requires_grad, x.dtype, y.tolist())
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return [modules, parameters, tensors, given, modes, torch.get_rng_state().tolist()]


@contextmanager
def unchanged(net: nn.Module, x: Tensor, y: Tensor) -> Iterator[None]:
    before = snapshot(net, x, y)
    yield
    assert snapshot(net, x, y) == before


def attacked(name: str, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with unchanged(net, x, y):
        x_adv = SMALL[name](net, x, y)
    assert not x_adv.requires_grad
    assert x_adv.data_ptr() != x.data_ptr()
    return x_adv


def test_every_attack_of_the_registry_is_in_the_matrix() -> None:
    assert {type(spec) for spec in SPECS} == set(ATTACKS)


class TestModels:
    @every_attack
    def test_a_model_that_changes_its_input_is_attacked_as_any_other(self, name: str) -> None:
        x, y = batch()
        assert torch.equal(attacked(name, InPlace(), x, y), attacked(name, NotInPlace(), x, y))

    @every_attack
    @pytest.mark.parametrize(
        ("net", "message"),
        [
            (NaNLogits(), "logits are not a number for . of . images"),
            (NaNGradient(), "gradient is not a number for . of . images"),
            (OneRow(), "1 rows for 6 images"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_a_model_that_lies_raises_one_sentence(
        self, name: str, net: nn.Module, message: str
    ) -> None:
        x, y = batch()
        x[0, 0, 0, 0] = 0.0  # the first image alone is no problem
        if name in ("Clean", "Corruption") or (
            name in NEEDS_NO_GRADIENT and isinstance(net, NaNGradient)
        ):
            attacked(name, net, x, y)
            return
        with unchanged(net, x, y), pytest.raises(BadInput, match=message):
            SMALL[name](net, x, y)

    @every_attack
    def test_hooks_train_mode_gradients_and_buffers_stay(self, name: str) -> None:
        net, (x, y), seen = Net().train(), batch(), list[int]()
        net(x).sum().backward()
        net.fc.bias.requires_grad_(False)
        net.drop.eval()
        net.register_forward_hook(lambda *_: seen.append(1))
        attacked(name, net, x.requires_grad_(), y)
        assert seen

    @every_attack
    def test_inference_mode_is_no_obstacle(self, name: str) -> None:
        net, (x, y) = Net(), batch()
        expected = attacked(name, net, x, y)
        with torch.inference_mode():
            found = attacked(name, net, x.clone(), y.clone())
        assert not found.is_inference()
        assert torch.equal(found, expected)

    @every_attack
    def test_minus_infinity_masks_a_class(self, name: str) -> None:
        class Masked(Net):
            def after(self, logits: Tensor, x: Tensor) -> Tensor:
                return logits.masked_fill(torch.arange(CLASSES) == 3, -torch.inf)

        net, (x, _) = Masked(), batch()
        attacked(name, net, x, net(x).argmax(1))

    def test_no_step_waits_for_the_device(self) -> None:
        (x, y), counts = batch(), []
        for steps in (2, 12):
            with CountSynchronisations() as synchronisations:  # type: ignore[no-untyped-call]
                model = CheckedModel(Net(), x.dtype)
                PGD(BALL, steps=steps).perturb(model, x, y, y)
            counts.append(synchronisations.count)
        assert 0 < counts[0] == counts[1]

    def test_nan_in_a_later_step_is_found(self) -> None:
        class Later(NaNLogits):
            calls = 0

            def after(self, logits: Tensor, x: Tensor) -> Tensor:
                self.calls += 1
                return super().after(logits, x) if self.calls == 7 else logits

        x, y = batch()
        with pytest.raises(BadInput, match=r"logits are not a number for . of 6 images"):
            PGD(BALL, steps=8)(Later(), x, y)

    def test_infinite_logits_are_refused(self) -> None:
        class Infinite(Net):
            def after(self, logits: Tensor, x: Tensor) -> Tensor:
                return logits / 0

        with pytest.raises(BadInput, match="logits are not a number"):
            Square(BALL)(Infinite(), *batch())

    @pytest.mark.parametrize("answer", [torch.zeros(COUNT), torch.zeros(COUNT, 0)])
    def test_logits_need_two_dimensions(self, answer: Tensor) -> None:
        x, y = batch()
        with pytest.raises(BadInput, match="logits"):
            PGD(BALL)(lambda images: answer[: len(images)], x, y)

    def test_a_model_without_a_gradient_is_named(self) -> None:
        class Detached(Net):
            def before(self, x: Tensor) -> Tensor:
                return x.detach()

        x, y = batch()
        with pytest.raises(BadInput, match="no gradient with respect to the images"):
            PGD(BALL)(Detached().requires_grad_(False), x, y)

    def test_a_failing_model_is_named_with_the_images(self) -> None:
        x, y = batch()
        with pytest.raises(BadInput, match=r"fails on 1 x 2 x 4 x 4 pixels of torch"):
            PGD(BALL)(Net(), x.repeat(1, 2, 1, 1), y)

    def test_images_with_requires_grad_keep_no_graph(self) -> None:
        x, y = batch()
        x_adv = PGD(BALL, steps=2)(Net(), x.requires_grad_(), y)
        assert x_adv.grad_fn is None


HALF, BRAIN, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [  # of net and images; half precision is slow on a CPU, so one attack has it
    *((name, *both) for name in SMALL for both in ((BRAIN, FLOAT), (DOUBLE, FLOAT))),
    *((name, FLOAT, DOUBLE) for name in SMALL),
    ("PGD", HALF, FLOAT), ("PGD", HALF, HALF), ("PGD", FLOAT, HALF),
]  # fmt: skip


@pytest.mark.parametrize(("name", "of_net", "of_images"), DTYPES, ids=str)
def test_dtypes_of_net_and_images_mix(
    name: str, of_net: torch.dtype, of_images: torch.dtype
) -> None:
    x, y = batch()
    net, x = Net().to(of_net), x.to(of_images)
    x_adv = attacked(name, net, x, y)
    widest = torch.promote_types(torch.promote_types(of_net, of_images), torch.float32)
    assert x_adv.dtype == widest
    assert SMALL[name].inside(x.to(widest), x_adv).all()


class NaNScore(nn.Module):
    """A score of NaN for bright images."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(1).mean(1)
        return torch.where(mean > mean.median(), torch.nan, mean)


class TestScores:
    rule = AcceptedError(ModelScore(), 0.5)

    @pytest.mark.parametrize(
        "attack",
        [
            PGD(BALL, steps=2, keep="success", criterion=rule),
            Square(BALL, queries=3, criterion=rule),
            CW(steps=2, searches=1, criterion=rule),
            small(RejectAutoAttackEnsemble(BALL, rule)),
        ],
        ids=lambda attack: type(attack).__name__,
    )
    def test_a_score_of_nan_is_no_rejection(self, attack: Attack) -> None:
        x, y = batch()
        model = ModelWithScore(Net(), NaNScore())
        with pytest.raises(BadInput, match=r"(score|objective|gradient) is not a number for"):
            attack(model, x, y)

    def test_the_decisions_themselves_refuse_nan(self) -> None:
        none, nan = torch.zeros(2, 0), torch.full((2, 3), torch.nan)
        y = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(BadInput, match="score is not a number for 2 of 2 images"):
            ModelScore().rule(0.5).accepted(Output(torch.zeros(2, 3), none, nan))
        with pytest.raises(BadInput, match="logits are not a number for 2 of 2 images"):
            AcceptedError(Con(), 0.5)(Output(nan, none, none), y)
        with pytest.raises(BadInput, match="threshold is NaN"):
            Con().rule(torch.nan)
        with pytest.raises(BadInput, match="2 rows for 1 images"):
            AcceptedError(Con(), 0.5)(Output(torch.zeros(2, 3), none, none), y[:1])

    def test_a_model_that_changes_its_input_does_not_change_the_scores(self) -> None:
        x, _ = batch()
        aux = [ModelWithScore(net, lambda images: images.sum((1, 2, 3)))(x.clone()).aux
               for net in (InPlace(), NotInPlace())]  # fmt: skip
        assert torch.equal(*aux)


class TestImages:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, y: (x.numpy(), y), "torch tensor, not ndarray"),
            (lambda x, y: (x.tolist(), y), "torch tensor, not list"),
            (lambda x, y: (x, np.zeros(COUNT, int)), "labels must be a torch tensor"),
            (lambda x, y: (x[:0], y[:0]), "batch is empty"),
            (lambda x, y: (x[:, :, :0, :0], y), "have no pixels"),
            (lambda x, y: (255 * x, y), r"pixels must lie in \[0, 1\]"),
            (lambda x, y: (x, y + CLASSES), "labels must be from 0 to 3"),
            (lambda x, y: (x, torch.cat((y[:-1], y[:1] + CLASSES))), "labels must be from 0 to 3"),
            (lambda x, y: (x, y - CLASSES), "labels must be at least 0"),
        ],
    )
    def test_every_entry_refuses_what_is_no_batch(self, change: Any, message: str) -> None:
        bad, net = change(*batch()), Net()
        options: dict[str, Any] = {"eps": 0.1, "verbose": False}
        entries = [
            PGD(BALL, steps=1),
            CW(steps=1, searches=1).distances,
            AutoAttack(net, **options).run_standard_evaluation,
            RejectAutoAttack(net, RULE, **options).run_standard_evaluation,
        ]
        for entry in entries:
            arguments = bad if entry in entries[2:] else (net, *bad)
            with pytest.raises(BadInput, match=message):
                entry(*arguments)  # type: ignore[operator]

    def test_labels_after_the_first_images_are_checked_too(self) -> None:
        x, y = (torch.cat([part] * 20) for part in batch())
        y[-1] = CLASSES
        with pytest.raises(BadInput, match="labels must be from 0 to 3"):
            AutoAttack(Net(), verbose=False).run_standard_evaluation(x, y)

    @pytest.mark.parametrize("ball", [Linf, L2])
    @pytest.mark.parametrize("eps", [1e38, -0.1, float("nan"), float("inf")])
    def test_radii_without_a_meaning_are_refused(self, ball: type[L2], eps: float) -> None:
        with pytest.raises(BadInput, match="eps"):
            ball(eps)


class Escaping(PGD):
    """A faulty attack of a user."""

    def run(self, *_: Any) -> Tensor:
        return super().run(*_) + 0.05


def test_a_result_outside_the_ball_names_the_attack() -> None:
    with pytest.raises(BadInput, match=r"Escaping returned . of 6 images outside its ball"):
        Escaping(BALL, steps=1)(Net(), *batch())


@pytest.mark.filterwarnings("ignore:the model's outputs are random")
def test_the_interface_leaves_everything_as_it_was() -> None:
    net, (x, y) = Net().half().train(), batch()
    attack = AutoAttack(net, eps=0.1, verbose=False)
    attack.chain = Chain(tuple(small(part) for part in attack.chain.attacks))
    attack.on_masking = few_queries(attack.on_masking)
    with unchanged(net, x, y), pytest.warns(UserWarning, match="train mode"):
        x_adv, labels = attack.run_standard_evaluation(
            x.requires_grad_(False), y, return_labels=True
        )
    assert Linf(0.1).contains(x, x_adv).all()
    assert labels.shape == y.shape
    assert as_output(copy.deepcopy(net)(x_adv.half())).logits.shape == (COUNT, CLASSES)


class SharedWeights(Net):
    """One layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.conv

    def before(self, x: Tensor) -> Tensor:
        return self.again(x).mean(1, keepdim=True).sigmoid()  # type: ignore[no-any-return]


class Rounded(Net):
    """A net that is evaluated as if it were quantised: its logits are rounded."""

    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        return logits + ((8 * logits).round() / 8 - logits).detach()


class Branching(Net):
    """Control flow that depends on the images."""

    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        return 2 * logits if bool(x.mean() > 0.5) else logits


class NonContiguous(Net):
    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        return logits.t().contiguous().t()


class Constant(Net):
    def after(self, logits: Tensor, x: Tensor) -> Tensor:
        return 0 * logits


ODD: dict[str, nn.Module] = {
    "shared weights": SharedWeights(),
    "rounded outputs": Rounded(),
    "branches": Branching(),
    "non-contiguous": NonContiguous(),
    "constant": Constant(),
    "frozen": Net().requires_grad_(False),
    "float64": Net().double(),
    "scripted": torch.jit.trace(Net(), torch.zeros(2, *SHAPE)),
    "data parallel": nn.DataParallel(Net()),
}


def both_ensembles() -> Iterator[Any]:
    """Every odd model with both ensembles, in the suite with one of them."""
    for position, kind in enumerate(ODD):
        for of_rejector in (False, True):
            is_long = position % 2 == of_rejector
            yield pytest.param(kind, of_rejector, marks=[pytest.mark.exhaustive] * is_long)


@pytest.mark.parametrize(("kind", "of_rejector"), list(both_ensembles()))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_odd_models_get_a_verdict_and_stay_as_they_were(kind: str, of_rejector: bool) -> None:
    net, (x, y) = ODD[kind], batch()
    attack: AutoAttack | RejectAutoAttack = (
        RejectAutoAttack(net, RULE, eps=0.1, verbose=False)
        if of_rejector
        else AutoAttack(net, eps=0.1, verbose=False)
    )
    chain = small(attack.chain)
    assert isinstance(chain, Chain)
    attack.chain, attack.on_masking = chain, few_queries(attack.on_masking)
    with unchanged(net, x, y):
        result = attack.evaluate(x, y)
    assert result.attacked.n == COUNT
    assert result.unbroken == COUNT - result.attacked.accepted_wrong
    assert BALL.contains(x, result.x_adv.float()).all()


def test_a_net_of_one_class_is_named() -> None:
    class OneClass(Net):
        def after(self, logits: Tensor, x: Tensor) -> Tensor:
            return logits[:, :1]

    with pytest.raises(BadInput, match="one class only"):
        AutoAttack(OneClass(), verbose=False).evaluate(batch()[0], torch.zeros(COUNT).long())
