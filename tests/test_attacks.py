"""The contract of every attack, objective and criterion, and gradient queries."""

import copy
import doctest
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from demur.attacks import (
    APGD,
    ATTACKS,
    CE,
    CRITERIA,
    CW,
    DLR,
    FAB,
    GAMA,
    KL,
    OBJECTIVES,
    PGD,
    AcceptedError,
    Attack,
    AutoAttackEnsemble,
    Chain,
    Clean,
    Ensemble,
    FalseRejection,
    ForceRejectionEnsemble,
    MarginProduct,
    MaxMinMargin,
    MinMargin,
    Misclassified,
    MultiTarget,
    Objective,
    OrthogonalAPGD,
    PlusLogScore,
    RejectAutoAttackEnsemble,
    Rejected,
    RejectionObjective,
    RRLoss,
    Scaled,
    ScoreObjective,
    SingleMargin,
    Square,
    Sum,
    TargetedConfidence,
    TargetedDLR,
    TargetedMargin,
    UntargetedMargin,
    WrongConfidence,
    XiObjective,
)  # fmt: skip
from demur.attacks.objectives import CARLMargin, CARLObjective, RejectionHinge
from demur.autoattack import AutoAttack, RejectAutoAttack
from demur.balls import L2, Ball, Linf
from demur.data import Images
from demur.errors import BadInput
from demur.gradient import AttackModel, Gradient, gradient
from demur.nets import RejectingNet
from demur.output import Output, as_output, prediction
from demur.recipes import NAMED_ATTACKS, RECIPES
from demur.rejectors import Con, Coupled, Energy, RCon
from demur.wrappers import ModelWithScore, RejectClassModel
from tests.linear import LinearNet, centred_images

RULE = AcceptedError(RCon(), 0.6)
EXAMPLES: dict[str, Attack] = {
    **{name: make(RECIPES["digits-pgdat-rr"]) for name, make in NAMED_ATTACKS.items()},
    "adaptive-apgd": APGD(Linf(0.15), objective=MarginProduct(RULE), criterion=RULE),
    "adaptive": PGD(
        Linf(0.15), steps=8, objective=PlusLogScore(RCon(), eta=0.1), keep="success",
        criterion=AcceptedError(RCon(), 0.6),
    ),
    "reject-autoattack": RejectAutoAttackEnsemble(Linf(0.15), RULE),
    "force-rejection": ForceRejectionEnsemble(Linf(0.15), Rejected(RCon(), 0.6)),
    "reject-coupled": RejectAutoAttackEnsemble(
        L2(0.8), AcceptedError(Coupled(gate_threshold=0.6), 0.5), version="fast"
    ),
    "orthogonal": OrthogonalAPGD(Linf(0.15), steps=8, objective=MinMargin(RULE), criterion=RULE),
    "balanced": MaxMinMargin(L2(0.8), RULE, steps=8),
    "autoattack-plus": AutoAttackEnsemble(Linf(0.1), version="plus"),
    "chain": Chain(
        (PGD(Linf(0.1), steps=4), Square(Linf(0.1), queries=20)), rank_by=UntargetedMargin()
    ),
    "restarts": PGD(L2(0.5), steps=4, restarts=3),
    "until-success": PGD(
        Linf(0.1), steps=4, restarts=3, keep="success", objective=UntargetedMargin()
    ),
    "from-clean": PGD(Linf(0.1), steps=4, start="clean"),
    "momentum": PGD(L2(0.5), steps=4, objective=UntargetedMargin(), momentum=0.5, decay_steps=(2,)),
    "backtracking": PGD(
        Linf(0.1), steps=6, start="mixed", objective=WrongConfidence(), momentum=0.9, backtrack=1.5
    ),
    "backtracking by another objective": PGD(
        Linf(0.1), steps=6, start="coin", objective=WrongConfidence(), backtrack=1.5,
        backtrack_objective=CE(), restarts=2,
    ),
    "sum": PGD(
        Linf(0.1), steps=4,
        objective=CE() + 0.5 * PlusLogScore(Coupled(), eta=2.0, base_objective=UntargetedMargin()),
    ),
    "gama sum": PGD(L2(0.5), steps=4, start="signs", objective=CE() + 0.1 * GAMA(), restarts=2),
    "targets": MultiTarget(
        PGD(
            Linf(0.1), steps=3,
            objective=PlusLogScore(RCon(), base_objective=TargetedConfidence()) + TargetedDLR(),
        ),
        targets=3, keep="success", criterion=AcceptedError(Con(), 0.5),
    ),
    "apgd": APGD(Linf(0.1), steps=12, objective=DLR(), restarts=2),
    "apgd-l2": APGD(
        L2(0.5), steps=12, keep="max_objective", objective=UntargetedMargin(), eot_iter=2
    ),
    "fab": FAB(Linf(0.15), steps=5, restarts=2),
    "fab-l2": FAB(L2(0.8), steps=5, restarts=2),
    "cw": CW(searches=2, steps=15, rate=0.05, constant=1.0),
    "cw-linf": CW("Linf", searches=2, steps=15, rate=0.05, constant=1.0),
    "cw-linf-adam": CW("Linf-adam", searches=2, steps=15, rate=0.05, confidence=1.0, abort=False),
    "cw-adaptive": CW(searches=2, steps=15, rate=0.05, criterion=AcceptedError(Con(), 0.5)),
    "cw-adaptive-linf": CW("Linf", searches=2, steps=15, rate=0.05, criterion=Rejected(Con(), 0.5)),
    "square": Square(Linf(0.15), queries=30),
    "square-l2": Square(L2(0.8), queries=30),
    "dlr": PGD(
        Linf(0.1), steps=4,
        objective=DLR() + WrongConfidence() + ScoreObjective(Con()) + RRLoss(),
    ),
}  # fmt: skip
OBJECTIVE_EXAMPLES: list[Objective] = [
    CE(), UntargetedMargin(), PlusLogScore(Energy()), XiObjective(),
    Sum((CE(), UntargetedMargin())),
    Scaled(-2.0, CE()), DLR(), WrongConfidence(), TargetedMargin(), TargetedDLR(),
    TargetedConfidence(), ScoreObjective(RCon()), RRLoss(), GAMA(), KL(), MinMargin(RULE),
    SingleMargin(RULE, 1), MarginProduct(RULE), RejectionObjective(Rejected(Con(), 0.5)),
    CARLObjective(), CARLMargin(), RejectionHinge(),
]  # fmt: skip


def shortened(attack: Attack) -> Attack:
    """The same attack with few steps and restarts."""
    if isinstance(attack, PGD):
        return replace(attack, steps=min(attack.steps, 10), restarts=min(attack.restarts, 3))
    if isinstance(attack, MultiTarget):
        return replace(attack, attack=shortened(attack.attack), targets=2)
    if isinstance(attack, Ensemble):
        return shortened(attack.chain())
    if isinstance(attack, Chain):
        return replace(attack, attacks=tuple(shortened(member) for member in attack.attacks))
    if isinstance(attack, APGD | FAB | MaxMinMargin):
        return replace(attack, steps=min(attack.steps, 6), restarts=min(attack.restarts, 2))
    return (
        replace(attack, queries=min(attack.queries, 20)) if isinstance(attack, Square) else attack
    )


def ball_of(attack: Attack) -> Ball:
    """The ball of an attack."""
    inner = attack.attacks[0] if isinstance(attack, Chain) else getattr(attack, "attack", attack)
    ball = getattr(inner, "ball", Linf(0))
    assert isinstance(ball, Ball)
    return ball


NEED_AUX = (
    "adaptive", "adaptive-apgd", "sum", "xi", "targets", "dlr", "reject-autoattack",
    "force-rejection", "reject-coupled", "orthogonal", "balanced", "adaptive-ce-log-score",
    "adaptive-ce-rr", "adaptive-con-rr", "adaptive-con-log-score", "adaptive-targets-rr",
    "adaptive-ce-score",
)  # fmt: skip
SHORT = {name: shortened(attack) for name, attack in EXAMPLES.items()}


def test_every_attack_objective_and_criterion_has_an_example() -> None:
    assert {type(a) for a in EXAMPLES.values()} == set(ATTACKS)
    assert {type(g) for g in OBJECTIVE_EXAMPLES} == set(OBJECTIVES)
    assert set(CRITERIA) == {Misclassified, AcceptedError, FalseRejection, Rejected}


@pytest.mark.parametrize("name", SHORT)
class TestContract:
    def test_stays_in_the_ball_and_in_the_pixel_range(
        self, name: str, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        attack, (x, y) = SHORT[name], batch
        x_adv = attack(tiny_net, x, y)
        assert x_adv.shape == x.shape
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1
        if isinstance(attack, CW):
            return  # minimises the distance, without a bound
        ball = ball_of(attack)
        assert ball.norm(x_adv - x).max() <= ball.eps * (1 + 1e-6) + 1e-7

    def test_is_repeatable_and_has_no_side_effects(
        self, name: str, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        attack, (x, y) = SHORT[name], batch
        weights = {k: v.clone() for k, v in tiny_net.state_dict().items()}
        images, generator = x.clone(), torch.get_rng_state()
        first = attack(tiny_net, x, y)
        assert torch.equal(first, attack(tiny_net, x, y))
        assert torch.equal(x, images)
        assert torch.equal(generator, torch.get_rng_state())
        assert not tiny_net.training
        assert all(p.grad is None for p in tiny_net.parameters())
        assert all(torch.equal(v, weights[k]) for k, v in tiny_net.state_dict().items())

    def test_does_not_depend_on_the_batch_an_image_is_in(
        self, name: str, test_images: Images
    ) -> None:
        net, attack = LinearNet().eval(), SHORT[name]
        x, index = centred_images(9), torch.arange(40, 49)
        y = prediction(net(x))
        full = attack(net, x, y, index)
        flipped = attack(net, x.flip(0), y.flip(0), index.flip(0))
        one = attack(net, x[4:5], y[4:5], index[4:5])
        assert torch.allclose(full, flipped.flip(0), atol=1e-9)
        assert torch.allclose(full[4:5], one, atol=1e-9)

    def test_accepts_a_batch_of_one(
        self, name: str, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x, y = batch
        assert SHORT[name](tiny_net, x[:1], y[:1]).shape == x[:1].shape

    def test_works_on_any_module_that_returns_logits(
        self, name: str, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x, y = batch
        logits_only = tiny_net.classifier().eval()
        if name in NEED_AUX:
            with pytest.raises(BadInput, match="auxiliary head"):
                SHORT[name](logits_only, x, y)
            return
        assert torch.equal(SHORT[name](logits_only, x, y), SHORT[name](tiny_net, x, y))

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda x, y: (x * 2 - 1, y), r"pixels must lie in \[0, 1\]"),
            (lambda x, y: (x * 255, y), r"pixels must lie in \[0, 1\]"),
            (lambda x, y: (x * torch.nan, y), r"pixels must lie in \[0, 1\]"),
            (lambda x, y: (x[0], y), "shape N, C, H, W"),
            (lambda x, y: ((x * 255).byte(), y), "x.float"),
            (lambda x, y: (x[:0], y[:0]), "empty"),
            (lambda x, y: (x, y[:-1]), "one integer per image"),
            (lambda x, y: (x, y.float()), "y.long"),
            (lambda x, y: (x, y + 10), "labels must be from 0 to 9"),
            (lambda x, y: (x, y - 10), "labels must be at least 0"),
            (lambda x, y: (x.double(), y), "torch.float32, not .* torch.float64"),
            (lambda x, y: (x.repeat(1, 3, 1, 1), y), "N, 1, 8, 8"),
            (lambda x, y: (x.repeat(1, 1, 2, 2), y), "N, 1, 8, 8"),
        ],
    )
    def test_rejects_invalid_input(
        self, name: str, spoil: object, message: str, tiny_net: RejectingNet,
        batch: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        assert callable(spoil)
        with pytest.raises(BadInput, match=message):
            SHORT[name](tiny_net, *spoil(*batch))


def test_index_must_have_one_entry_per_image(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(BadInput, match="one integer per image"):
        PGD(Linf(0.1))(tiny_net, *batch, index=torch.arange(3))


@pytest.mark.parametrize("label", [-1, 10])
def test_invalid_labels_raise_in_train_mode_without_side_effects(
    label: int, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    net = copy.deepcopy(tiny_net).train()
    net.trunk.eval()  # one frozen submodule
    before, modes = net.state_dict(), [part.training for part in net.modules()]
    before = {name: value.clone() for name, value in before.items()}
    with pytest.raises(BadInput, match=r"labels must be (at least|from) 0"):
        PGD(Linf(0.1))(net, x, torch.cat([y[:-1], y.new_tensor([label])]))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert modes == [part.training for part in net.modules()]


def test_a_classifier_with_one_class_raises(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    with pytest.raises(BadInput, match="one class only"):
        PGD(Linf(0.1))(lambda images: images.flatten(1)[:, :1], x, y * 0)


def _random_output(seed: int) -> tuple[Output, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(40, 5, generator=g)
    out = Output(logits, logits[:, :0], torch.randn(40, 1, generator=g))
    return out, torch.randint(0, 5, (40,), generator=g)


@given(st.integers(0, 10**6))
def test_criteria_partition_the_images(seed: int) -> None:
    out, y = _random_output(seed)
    wrong, accepted_error, false_rejection = (
        Misclassified()(out, y),
        AcceptedError(Con(), 0.5)(out, y),
        FalseRejection(Con(), 0.5)(out, y),
    )
    accepted = Con().rule(0.5).accepted(out)
    assert torch.equal(wrong & accepted, accepted_error)
    assert torch.equal(~wrong & ~accepted, false_rejection)
    assert torch.equal(UntargetedMargin()(out, y) > 0, wrong)


@given(st.integers(0, 10**6))
def test_objectives_add_and_scale(seed: int) -> None:
    out, y = _random_output(seed)
    combined = CE() + 3.0 * UntargetedMargin() + PlusLogScore(Con(), eta=0.5)
    by_hand = CE()(out, y) + 3 * UntargetedMargin()(out, y) + CE()(out, y) + 0.5 * Con()(out).log()
    assert torch.allclose(combined(out, y), by_hand, atol=1e-5)
    assert torch.equal(Scaled(-1.0, CE())(out, y), -CE()(out, y))


def test_gradient_matches_the_closed_form_of_a_linear_net() -> None:
    net, x = LinearNet(), centred_images(3)
    y = torch.tensor([0, 1, 2])
    grad, value, out = gradient(net, UntargetedMargin(), x, y)
    runner_up = out.logits.scatter(1, y[:, None], -torch.inf).argmax(1)
    assert torch.allclose(grad.flatten(1), net.weight[runner_up] - net.weight[y])
    assert torch.allclose(value, UntargetedMargin()(as_output(net(x)), y))
    assert net.weight.grad is None


def test_a_model_may_define_its_own_gradient() -> None:
    class ModelWithGradient(LinearNet, AttackModel):
        calls = 0

        def gradient(self, *query: Any) -> Gradient:
            ModelWithGradient.calls += 1
            return super().gradient(*query)

    net, x = ModelWithGradient(), centred_images(2)
    PGD(Linf(0.1), steps=5)(net, x, torch.zeros(2, dtype=torch.long))
    assert ModelWithGradient.calls == 5


def test_clean_changes_nothing(tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]) -> None:
    x_adv = Clean()(tiny_net, *batch)
    assert torch.equal(x_adv, batch[0])
    assert x_adv.data_ptr() != batch[0].data_ptr()


@pytest.mark.parametrize(
    "public",
    [
        PGD, APGD, AcceptedError, Misclassified, Linf, L2, AutoAttack, RejectAutoAttack,
        ModelWithScore, RejectClassModel,
    ],
)  # fmt: skip
def test_examples_of_public_docstrings_run(public: type) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(public, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
