"""The contract of every attack, objective and criterion, and gradient queries."""

import copy
from collections.abc import Callable
from dataclasses import fields, replace
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
    CW,
    DLR,
    FAB,
    GAMA,
    OBJECTIVES,
    PGD,
    AcceptedError,
    Attack,
    AutoAttackEnsemble,
    Chain,
    Clean,
    Corruption,
    Ensemble,
    FalseRejection,
    MaxMinMargin,
    Misclassified,
    MultiTarget,
    Objective,
    PlusLogScore,
    RejectAutoAttackEnsemble,
    Rejected,
    RRLoss,
    Scaled,
    ScoreObjective,
    Square,
    TargetedConfidence,
    TargetedDLR,
    UntargetedMargin,
    WrongConfidence,
)  # fmt: skip
from demur.attacks.attack_model import AttackModel, Gradient, attack_model
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.objectives.classification import AttackStart
from demur.data import Images
from demur.errors import BadInput
from demur.nets import RejectingNet
from demur.output import Output, as_output, prediction
from demur.recipes import NAMED_ATTACKS, RECIPES
from demur.rejectors import Con, Coupled, RCon
from demur.rejectors.rule import OperatingPoint
from demur.spec import Spec
from tests.linear import LinearNet, centred_images
from tests.objective_examples import objective_example
from tests.quick_net import QuickNet

RULE = AcceptedError(RCon(), 0.6)


def with_threshold(spec: Any) -> Any:
    """The spec with the threshold 0.6 in place of every operating point."""
    if isinstance(spec, tuple):
        return tuple(map(with_threshold, spec))
    if not isinstance(spec, Spec):
        return spec
    if isinstance(spec, OperatingPoint):
        return 0.6
    return replace(spec, **{f.name: with_threshold(getattr(spec, f.name)) for f in fields(spec)})


# Every named attack, so every class of the registry; then settings that differ in behaviour.
EXAMPLES: dict[str, Attack] = {
    **{
        name: with_threshold(make(RECIPES["digits-pgdat-rr"]))
        for name, make in NAMED_ATTACKS.items()
    },
    "reject-coupled": RejectAutoAttackEnsemble(
        L2(0.8), AcceptedError(Coupled(gate_threshold=0.6), 0.5), version="fast"
    ),
    "balanced": MaxMinMargin(L2(0.8), RULE, steps=8),
    "autoattack-plus": AutoAttackEnsemble(Linf(0.1), version="plus"),
    "rand": AutoAttackEnsemble(Linf(0.1), version="rand"),
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
        Linf(0.1), steps=6, start="ray_or_clean", objective=WrongConfidence(), backtrack=1.5,
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
    "fab": FAB(Linf(0.15), steps=2, restarts=2),
    "fab-l2": FAB(L2(0.8), steps=2, restarts=2),
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
LIMITS = {"steps": 4, "restarts": 2, "queries": 8, "searches": 2, "eot_iter": 2}
IN_A_CHAIN = LIMITS | {"steps": 2, "restarts": 1}  # other examples have restarts


def shortened(attack: Attack, limits: dict[str, int] = LIMITS) -> Attack:
    """The same attack with few steps and restarts."""
    if isinstance(attack, Ensemble):
        return shortened(attack.chain())
    if isinstance(attack, Chain):
        members = tuple(shortened(member, IN_A_CHAIN) for member in attack.attacks)
        return replace(attack, attacks=members)
    if isinstance(attack, MultiTarget):
        restarts = min(attack.restarts, limits["restarts"])
        inner = shortened(attack.attack, limits)
        return replace(attack, attack=inner, targets=2, restarts=restarts)
    names = {f.name for f in fields(attack)} & set(limits)
    changes: dict[str, Any] = {name: min(getattr(attack, name), limits[name]) for name in names}
    return replace(attack, **changes)


def ball_of(attack: Attack) -> Ball:
    """The ball of an attack."""
    inner = attack.attacks[0] if isinstance(attack, Chain) else getattr(attack, "attack", attack)
    ball = getattr(inner, "ball", Linf(0))
    assert isinstance(ball, Ball)
    return ball


SHORT = {name: shortened(attack) for name, attack in EXAMPLES.items()}


def test_every_attack_has_an_example() -> None:
    made = {type(attack) for attack in EXAMPLES.values()}
    assert set(ATTACKS) <= made | {type(attack) for attack in SHORT.values()}


@pytest.mark.parametrize("name", SHORT)
class TestContract:
    def test_stays_in_the_ball_is_repeatable_and_has_no_side_effects(
        self, name: str, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        attack, (x, y) = SHORT[name], tuple(part[:8] for part in batch)
        weights = {k: v.clone() for k, v in quick_net.state_dict().items()}
        images, generator = x.clone(), torch.get_rng_state()
        x_adv = attack(quick_net, x, y)
        assert torch.equal(x, images)
        assert torch.equal(generator, torch.get_rng_state())
        assert not quick_net.training
        assert all(p.grad is None for p in quick_net.parameters())
        assert all(torch.equal(v, weights[k]) for k, v in quick_net.state_dict().items())
        self.check_works_on_any_module_that_returns_logits(attack, quick_net, x, y, x_adv)
        assert x_adv.shape == x.shape
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1
        if isinstance(attack, CW | Corruption):
            return  # without a bound
        ball = ball_of(attack)
        assert ball.norm(x_adv - x).max() <= ball.eps * (1 + 1e-6) + 1e-7

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

    def check_works_on_any_module_that_returns_logits(
        self, attack: Attack, net: QuickNet, x: Tensor, y: Tensor, x_adv: Tensor
    ) -> None:
        """The same images once more, from the bare logits where the attack reads no head."""
        try:
            again = attack(net.classifier().eval(), x, y)
        except BadInput as error:
            assert "auxiliary head" in str(error)
            again = attack(net, x, y)
        assert torch.equal(again, x_adv)


def test_an_attack_on_r_con_needs_an_auxiliary_head(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(BadInput, match="auxiliary head for its accept logit"):
        SHORT["adaptive"](tiny_net.classifier().eval(), *batch)


def test_no_attack_overrides_the_checks_of_its_arguments() -> None:
    assert all(cls.__call__ is Attack.__call__ for cls in ATTACKS)


class TestArguments:
    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda x, y: (x * 2 - 1, y), r"pixels must lie in \[0, 1\]"),
            (lambda x, y: (x * 255, y), r"pixels must lie in \[0, 1\]"),
            (lambda x, y: (x * torch.nan, y), r"pixels must lie in \[0, 1\].* replace that image"),
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
        self,
        spoil: Callable[..., Any],
        message: str,
        tiny_net: RejectingNet,
        batch: tuple[Tensor, Tensor],
    ) -> None:
        with pytest.raises(BadInput, match=message):
            PGD(Linf(0.1), steps=1)(tiny_net, *spoil(*batch))


OBJECTIVE_EXAMPLES = {cls.__name__: objective_example(cls, RULE) for cls in OBJECTIVES}


@pytest.mark.parametrize("name", OBJECTIVE_EXAMPLES)
class TestObjectiveContract:
    def test_one_finite_value_and_gradient_per_image(
        self, name: str, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        objective, (x, y) = OBJECTIVE_EXAMPLES[name], batch
        inputs = self.inputs(objective, tiny_net, x, y)
        assert len(inputs) == objective.n_inputs
        grad, value, _ = attack_model(tiny_net).gradient(objective, x, y, *inputs)
        assert value.shape == y.shape
        assert value.isfinite().all()
        assert grad.isfinite().all()

    def test_an_image_has_the_same_value_in_any_batch(
        self, name: str, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        objective, (x, y) = OBJECTIVE_EXAMPLES[name], batch
        rows = torch.tensor([5, 2, 11])
        inputs, out = self.inputs(objective, tiny_net, x, y), tiny_net(x)
        all_values = objective(out, y, *inputs)
        some = objective(out.select(rows), y[rows], *(part[rows] for part in inputs))
        assert torch.allclose(some, all_values[rows], atol=1e-5)

    @staticmethod
    def inputs(objective: Objective, net: RejectingNet, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The state of the objective at the first step from a random start."""
        start = Linf(0.1).start(x, 0, torch.arange(len(x)), 0)
        state = objective.prepare(AttackStart(attack_model(net), x, start, y, (y + 1) % 10))
        return objective.at_step(state, 0, 10)


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
    grad, value, out = attack_model(net).gradient(UntargetedMargin(), x, y)
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
