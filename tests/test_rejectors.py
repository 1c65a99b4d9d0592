"""Contracts of every rejector."""

import numpy as np
import pytest
import torch
from torch import Tensor

from demur.attacks import PGD, AcceptedError
from demur.calibrate import TPR
from demur.errors import BadInput
from demur.evaluate import Evaluator
from demur.methods import RR, NoHead
from demur.nets import RejectingNet
from demur.output import Output
from demur.recipes import RECIPES, attack, recipe
from demur.rejectors import (
    REJECTORS,
    AcceptProbability,
    Con,
    ConMinusRectifier,
    Coupled,
    ModelScore,
    RCon,
    Rectifier,
)
from demur.rule import Rejector, Score

EXAMPLES: dict[str, Rejector] = {
    **RECIPES["digits-pgdat-rr"].rejectors(), "given": ModelScore(), "answers": AcceptProbability(),
    "difference": ConMinusRectifier(),
}  # fmt: skip


def test_every_rejector_has_an_example() -> None:
    named: set[type] = {type(r) for r in EXAMPLES.values()}
    assert named == set(REJECTORS)


@pytest.fixture
def fit_output(tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]) -> tuple[Output, Tensor]:
    x, y = batch
    return tiny_net(x), y


@pytest.fixture(scope="module")
def batch_loss(tiny_source: Evaluator) -> tuple[Output, Tensor]:
    """What the tiny net answers to images it was fitted on."""
    x, y = tiny_source.splits["fit"].batch(slice(0, 500))
    with torch.no_grad():
        return tiny_source.net(x), y


@pytest.mark.parametrize("name", EXAMPLES)
class TestContract:
    @pytest.fixture
    def score(self, name: str, batch_loss: tuple[Output, Tensor]) -> Score:
        rejector: Rejector = EXAMPLES[name]
        return rejector.fit(*batch_loss)

    def test_one_value_per_image_and_never_nan(
        self, score: Score, fit_output: tuple[Output, Tensor]
    ) -> None:
        out, y = fit_output
        assert score(out).shape == y.shape
        assert not score(out).isnan().any()
        assert score(out.select(torch.tensor([0]))).shape == (1,)

    def test_an_image_scores_the_same_in_any_batch(
        self, score: Score, fit_output: tuple[Output, Tensor]
    ) -> None:
        out, _ = fit_output
        order = torch.randperm(len(out.logits), generator=torch.Generator().manual_seed(0))
        assert torch.equal(score(out)[order], score(out.select(order)))
        alone = torch.cat([score(out.select(place)) for place in torch.arange(len(order)).split(1)])
        assert torch.allclose(alone, score(out), rtol=1e-4, atol=1e-4)

    def test_many_images_are_scored_a_piece_at_a_time(
        self, score: Score, batch_loss: tuple[Output, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, _ = batch_loss
        whole = score(out)
        monkeypatch.setattr("demur.rejectors.fitted.PIECE", 64)
        assert torch.allclose(score(out), whole, rtol=1e-4, atol=1e-4)

    def test_it_survives_export_with_the_net(
        self, score: Score, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        class Guarded(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.score = tiny_net, score

            def forward(self, x: Tensor) -> Tensor:
                return self.score(self.net(x))

        x = batch[0][:4]
        program = torch.export.export(Guarded(), (x,))
        # to rounding: outside of a graph, tiny convolutions are products
        assert torch.allclose(program.module()(x), score(tiny_net(x)), rtol=1e-4, atol=1e-4)

    def test_it_is_computed_in_full_precision_under_autocast(
        self, score: Score, batch_loss: tuple[Output, Tensor]
    ) -> None:
        out, _ = batch_loss
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(score(out), score(out).float())
            lowered = score(out)
        assert torch.equal(lowered, score(out))

    def test_the_gradient_reaches_the_pixels(
        self, score: Score, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x = batch[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(score.log_score(tiny_net(x)).sum(), x)
        assert grad.isfinite().all()
        assert (grad.flatten(1).abs().amax(1) > 0).all()
        assert all(p.grad is None for p in tiny_net.parameters())

    def test_climbing_trust_raises_the_score(
        self, score: Score, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x = batch[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(score.log_score(tiny_net(x)).sum(), x)
        with torch.no_grad():
            before = score.log_score(tiny_net(x))
            after = score.log_score(tiny_net((x + 0.001 * grad.sign()).clamp(0, 1)))
        assert (after >= before).float().mean() > 0.9

    def test_net_images_score_higher_than_noise(
        self, score: Score, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        g = torch.Generator().manual_seed(0)
        noise = torch.rand(len(batch[0]), *batch[0].shape[1:], generator=g)
        assert score(tiny_net(batch[0])).median() > score(tiny_net(noise)).median()


def test_a_head_names_its_scores_at_its_own_temperature() -> None:
    assert NoHead().rejectors() == {}
    named = RR(tau=0.25).rejectors()
    expected: dict[str, Rejector] = {
        "R-Con": RCon(0.25), "Con+R-Con": Coupled(Con(0.25), score=RCon(0.25)), "A": Rectifier(),
    }  # fmt: skip
    assert named == expected
    cool = recipe("digits-pgdat-rr", ["head.tau=0.25"])
    assert cool.rejectors()["R-Con"] == RCon(0.25)
    adaptive = attack("adaptive", cool)
    assert isinstance(adaptive, PGD)
    assert adaptive.criterion == AcceptedError(RCon(0.25), TPR(0.95))


def test_rcon_on_a_net_without_a_head_is_refused(fit_output: tuple[Output, Tensor]) -> None:
    out, _ = fit_output
    for score in (RCon(), Coupled()):
        with pytest.raises(BadInput, match="auxiliary head"):
            score(out._replace(aux=out.aux[:, :0]))


def test_rcon_is_con_times_a(fit_output: tuple[Output, Tensor]) -> None:
    out, _ = fit_output
    assert torch.allclose(RCon()(out), Con()(out) * out.aux[:, 0].sigmoid(), atol=1e-6)


def test_tpr_keeps_its_share_and_survives_a_closed_gate() -> None:
    rng = np.random.default_rng(0)
    score, correct = rng.random(200), rng.random(200) < 0.8
    t = TPR(0.95).threshold(score, correct)
    assert (score[correct] >= t).mean() >= 0.95
    assert (score[correct] > t).mean() < 0.95
    half_shut = np.where(np.arange(200) % 2 == 0, score, -np.inf)
    assert TPR(0.95).threshold(half_shut, correct) == half_shut[np.isfinite(half_shut)].min()
