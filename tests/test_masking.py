"""Models whose gradients lead nowhere: the signs, the attacks that follow, and the surrogates."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from demur.attacks import (
    APGD,
    AcceptedError,
    Attack,
    Chain,
    Criterion,
    HopSkipJump,
    Misclassified,
    RayS,
    Rejected,
    Square,
    autoattack,
)
from demur.attacks.attack_model import Model, checked
from demur.attacks.balls import L2, Ball, Linf
from demur.audits import AutoAttack, RejectAutoAttack, masking
from demur.audits.flags import masking_checks
from demur.audits.masking import OnMasking, OutcomeMargin, distil, student_net
from demur.errors import BadInput
from demur.output import Output, as_output, prediction
from demur.rejectors import Con, ModelScore
from tests.quick_net import QuickNet

EPS = 0.15


def masked_models(net: QuickNet) -> dict[str, Model]:
    """Models that decide as the net does, nearly, but whose gradients are of no use."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def logits(x: Tensor) -> Tensor:
        out: Output = net(x)
        return out.logits

    def jumping(x: Tensor) -> Tensor:  # gradients exist, but are those of another net
        of_other: Tensor = other(x).log_softmax(1)
        return 10 * one_hot(logits(x).argmax(1), 10) + of_other

    levels = torch.arange(1, 9)[:, None, None] / 9
    return {
        "argmax of one net, gradient of another": jumping,
        "rounded images": lambda x: logits((8 * x).round() / 8),
        "rounded logits": lambda x: logits(x).round(),
        "saturated softmax": lambda x: (logits(x) / 1e-3).softmax(1),
        "labels": lambda x: one_hot(logits(x).argmax(1), 10).to(x),
        "thermometer": lambda x: logits((x[:, :, None] > levels).to(x).mean(2)),
        "straight-through of another net": (
            lambda x: logits(x).detach() + 20 * (other(x) - other(x).detach())
        ),
    }


def few_decisions(ball: Ball, criterion: Criterion, seed: int) -> dict[str, Attack]:
    kinds = {"hopskipjump": HopSkipJump, "rays": RayS}
    return {k: kind(ball, 300, criterion=criterion, seed=seed) for k, kind in kinds.items()}


@pytest.fixture
def few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short attacks and a short training of students."""
    short = {"standard": (("apgd-ce", 1), ("square", 1))}
    monkeypatch.setattr(autoattack, "VERSIONS", autoattack.VERSIONS | short)
    monkeypatch.setattr(autoattack, "APGD", partial(APGD, steps=10))
    monkeypatch.setattr(autoattack, "Square", partial(Square, queries=40))
    monkeypatch.setattr(autoattack, "decision_attacks", few_decisions)
    monkeypatch.setattr(masking, "decision_attacks", few_decisions)
    monkeypatch.setattr(masking, "APGD", partial(APGD, steps=20))
    monkeypatch.setattr(masking, "ROUNDS", 2)


def test_masked_gradients_have_signs(quick_net: QuickNet, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    for name, model in masked_models(quick_net).items():
        with checked(model, x, y) as (own, images, labels):
            found = masking_checks(own, images, labels, Linf(EPS), None)
            assert any(check.flags for check in found), name


@pytest.mark.parametrize("ball", [Linf(EPS), L2(0.5)])
def test_ordinary_nets_have_none(
    ball: Linf | L2, quick_net: QuickNet, tiny_net: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    for net in (quick_net, tiny_net):
        with checked(net, *batch) as (own, images, labels):
            found = masking_checks(own, images, labels, ball, None)
            assert [check.flags for check in found] == [(), ()]


@pytest.mark.usefixtures("few_queries")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        "argmax of one net, gradient of another",
        pytest.param("straight-through of another net", marks=pytest.mark.exhaustive),
    ],
)
def test_the_ensemble_finds_what_gradients_hide(
    name: str, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    """Attacks on the hidden net know the truth."""
    x, y = batch
    model = masked_models(quick_net)[name]
    x_true = APGD(Linf(EPS), restarts=2, steps=30)(quick_net, x, y)
    true = int((prediction(as_output(model(x_true))) != y).sum())
    attack = AutoAttack(model, eps=EPS, verbose=False)
    after = attack.evaluate(x, y, sanity=False)
    attack.on_masking = OnMasking(attack.chain)
    before = attack.evaluate(x, y, sanity=False)
    assert before.unbroken - after.unbroken >= 4
    assert len(y) - after.unbroken >= true - 2
    assert {"hopskipjump", "rays", "surrogate"} <= set(after.seconds)
    assert any("gradients may be masked" in sentence for sentence in after.warnings)


@pytest.mark.usefixtures("few_queries")
def test_an_ordinary_net_needs_no_more_attacks(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    result = AutoAttack(quick_net, eps=0.05, verbose=False).evaluate(*batch, sanity=False)
    assert set(result.seconds) == {"apgd-ce", "square"}
    assert result.warnings == ()


@pytest.mark.usefixtures("few_queries")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_given_surrogate_always_runs_and_says_what_it_adds(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    model = masked_models(quick_net)["labels"]
    attack = AutoAttack(
        model, eps=EPS, verbose=False, version="custom", attacks_to_run=["square"],
        surrogate=quick_net,
    )  # fmt: skip
    result = attack.evaluate(x, y, sanity=False)
    direct = AutoAttack(quick_net, eps=EPS, verbose=False).evaluate(x, y, sanity=False)
    assert list(result.seconds) == ["square", "surrogate"]
    assert result.broken_by.count("surrogate") >= 4
    assert result.unbroken <= direct.unbroken + 1
    with pytest.raises(BadInput, match="surrogate must be a net from images to logits, not 3"):
        AutoAttack(model, surrogate=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("few_queries")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_black_box_needs_no_gradient_and_resumes(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    x, y = (part[:12] for part in batch)
    attack = AutoAttack(
        masked_models(quick_net)["labels"], eps=EPS, verbose=False, version="black-box"
    )
    own = few_decisions(Linf(EPS), Misclassified(), 0)
    attack.chain = Chain((Square(Linf(EPS), queries=40), *own.values()))
    first = attack.evaluate(x, y, sanity=False, state_path=tmp_path / "state")
    again = attack.evaluate(x, y, sanity=False, state_path=tmp_path / "state", bs=5)
    assert list(first.seconds) == ["square", "hopskipjump", "rays"]
    assert not any("skipped" in sentence for sentence in first.warnings)
    assert first.unbroken < first.clean.accepted_right
    assert torch.equal(first.x_adv, again.x_adv)
    in_l2 = AutoAttack(quick_net, "L2", 0.5, version="black-box")
    assert in_l2.names == ["square", "hopskipjump"]
    with pytest.raises(BadInput, match=r"RayS.ball must be Linf"):
        AutoAttack(quick_net, "L2", 0.5, version="custom", attacks_to_run=["rays"])


class TestStudent:
    def test_it_learns_decisions_and_rejections(
        self, quick_net: QuickNet, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(masking, "ROUNDS", 2)
        x, criterion = batch[0], AcceptedError(Con(), 0.9)
        generator = torch.get_rng_state()
        students = [distil(quick_net, criterion, Linf(EPS), x) for _ in range(2)]
        assert torch.equal(generator, torch.get_rng_state())
        first, second = (student(x) for student in students)
        assert torch.equal(first, second)
        outcome = prediction(quick_net(x)).masked_fill(Con()(quick_net(x)) < 0.9, 10)
        assert first.shape == (24, 11)
        assert 0 < int((outcome == 10).sum()) < 24
        assert (first.argmax(1) == outcome).float().mean() > 0.8

    def test_its_net_fits_the_images(self) -> None:
        for shape in ((1, 8, 8), (3, 32, 32), (3, 33, 64), (3, 2, 600)):
            student = student_net(torch.Size(shape), 7)
            assert student(torch.rand(2, *shape)).shape == (2, 7)

    def test_outcomes_that_the_criterion_wants(self) -> None:
        none = torch.zeros(1, 0)
        out, y = Output(torch.tensor([[1.0, 4.0, 2.0, 8.0]]), none, none), torch.tensor([1])
        for criterion, rejects, value in (
            (Misclassified(), False, 8 - 4),
            (AcceptedError(Con(), 0.5), True, 2 - 8),
            (AcceptedError(Con(), 0.5), False, 8 - 4),  # a given net knows no rejection
            (Rejected(Con(), 0.5), True, 8 - 4),
        ):
            assert OutcomeMargin(criterion, rejects)(out, y).item() == value

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("few_queries")
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_it_serves_a_rejector_without_gradient(
        self, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        def labels_and_score(x: Tensor) -> Output:
            out = quick_net(x)
            label, score = one_hot(prediction(out), 10).to(x), (Con()(out) > 0.6).to(x)
            return Output(label, x.flatten(1)[:, :0], score[:, None]).detached()

        criterion = AcceptedError(ModelScore(), 0.5)
        attack = RejectAutoAttack(labels_and_score, criterion, eps=EPS, verbose=False)
        kept = replace(attack.chain, attacks=attack.chain.attacks[-1:])
        attack.chain, attack.names = kept, ["square"]
        result = attack.evaluate(*batch, sanity=False)
        assert {"hopskipjump", "rays", "surrogate"} <= set(result.seconds)
        assert result.attacked.accepted_wrong >= result.clean.accepted_wrong + 4
