"""Properties that every rejector has."""

import numpy as np
import pytest
import torch
from torch import Tensor

from demur.attacks import PGD, AcceptedError
from demur.calibrate import TPR
from demur.data import Digits
from demur.errors import BadInput
from demur.evaluate import LoadedRun
from demur.methods import RR, NoHead
from demur.nets import RejectingNet
from demur.output import Output
from demur.recipes import attack, recipe
from demur.rejectors import REJECTORS, Con, Coupled, ImageRejector, RCon, Rectifier
from demur.rejectors.rule import Rejector, Score

# Every class of the registry that scores outputs (test_own_rejector.py has those that see images):
# as every net on the digits is scored with it, else its defaults.
EXAMPLES: dict[str, Rejector] = {
    name: rejector
    for cls in REJECTORS
    if not issubclass(cls, ImageRejector)
    for name, rejector in (cls.baselines(Digits()) or {cls.__name__: cls()}).items()
}


@pytest.fixture
def sample(tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]) -> tuple[Output, Tensor]:
    x, y = batch
    return tiny_net(x), y


@pytest.fixture(scope="module")
def fit_split(tiny_source: LoadedRun) -> tuple[Output, Tensor]:
    """Output of the tiny net for images of the fit split, and their labels."""
    x, y = tiny_source.splits["fit"].batch(slice(0, 500))
    with torch.no_grad():
        return tiny_source.net(x), y


def test_scores_can_be_exported_with_the_net(
    tiny_net: RejectingNet, batch: tuple[Tensor, Tensor], fit_split: tuple[Output, Tensor]
) -> None:
    class ScoredNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_net
            for name, rejector in EXAMPLES.items():
                setattr(self, f"score of {name}", rejector.fit(*fit_split))

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            return torch.stack([getattr(self, f"score of {name}")(out) for name in EXAMPLES])

    x = batch[0][:4]
    program = torch.export.export(ScoredNet(), (x,))
    # equal up to rounding: without a graph, tiny convolutions are matrix products
    assert torch.allclose(program.module()(x), ScoredNet()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EXAMPLES)
class TestContract:
    @pytest.fixture
    def score(self, name: str, fit_split: tuple[Output, Tensor]) -> Score:
        rejector: Rejector = EXAMPLES[name]
        return rejector.fit(*fit_split)

    def test_one_value_per_image_and_never_nan(
        self, score: Score, sample: tuple[Output, Tensor]
    ) -> None:
        out, y = sample
        assert score(out).shape == y.shape
        assert not score(out).isnan().any()
        assert score(out.select(torch.tensor([0]))).shape == (1,)

    def test_an_image_scores_the_same_in_any_batch(
        self, score: Score, sample: tuple[Output, Tensor]
    ) -> None:
        out, _ = sample
        order = torch.randperm(len(out.logits), generator=torch.Generator().manual_seed(0))
        assert torch.equal(score(out)[order], score(out.select(order)))
        alone = torch.cat([score(out.select(row)) for row in torch.arange(len(order)).split(1)])
        assert torch.allclose(alone, score(out), rtol=1e-4, atol=1e-4)

    def test_scores_do_not_depend_on_the_chunk_size(
        self, score: Score, fit_split: tuple[Output, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, _ = fit_split
        at_once = score(out)
        monkeypatch.setattr("demur.rejectors.rule.CHUNK", 64)
        assert torch.allclose(score(out), at_once, rtol=1e-4, atol=1e-4)

    def test_it_is_computed_in_full_precision_under_autocast(
        self, score: Score, fit_split: tuple[Output, Tensor]
    ) -> None:
        out, _ = fit_split
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(score(out), score(out).float())
            under_autocast = score(out)
        assert torch.equal(under_autocast, score(out))

    def test_the_gradient_reaches_the_pixels(
        self, score: Score, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x = batch[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(score.log_score(tiny_net(x)).sum(), x)
        assert grad.isfinite().all()
        assert (grad.flatten(1).abs().amax(1) > 0).all()
        assert all(p.grad is None for p in tiny_net.parameters())

    def test_a_step_along_the_gradient_raises_the_log_score(
        self, score: Score, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x = batch[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(score.log_score(tiny_net(x)).sum(), x)
        with torch.no_grad():
            before = score.log_score(tiny_net(x))
            after = score.log_score(tiny_net((x + 0.001 * grad.sign()).clamp(0, 1)))
        assert (after >= before).float().mean() > 0.9

    def test_test_images_score_higher_than_noise(
        self, score: Score, tiny_net: RejectingNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        g = torch.Generator().manual_seed(0)
        noise = torch.rand(len(batch[0]), *batch[0].shape[1:], generator=g)
        assert score(tiny_net(batch[0])).median() > score(tiny_net(noise)).median()


def test_a_head_has_rejectors_at_its_temperature() -> None:
    assert NoHead().rejectors() == {}
    rejectors = RR(tau=0.25).rejectors()
    expected: dict[str, Rejector] = {
        "R-Con": RCon(0.25), "Con+R-Con": Coupled(Con(0.25), score=RCon(0.25)), "A": Rectifier(),
    }  # fmt: skip
    assert rejectors == expected
    with_tau = recipe("digits-pgdat-rr", ["head.tau=0.25"])
    assert with_tau.rejectors()["R-Con"] == RCon(0.25)
    adaptive = attack("adaptive", with_tau)
    assert isinstance(adaptive, PGD)
    assert adaptive.criterion == AcceptedError(RCon(0.25), TPR(0.95))


def test_rcon_of_a_net_without_a_head_raises(sample: tuple[Output, Tensor]) -> None:
    out, _ = sample
    for score in (RCon(), Coupled()):
        with pytest.raises(BadInput, match="auxiliary head"):
            score(out._replace(aux=out.aux[:, :0]))


def test_rcon_is_con_times_a(sample: tuple[Output, Tensor]) -> None:
    out, _ = sample
    assert torch.allclose(RCon()(out), Con()(out) * out.aux[:, 0].sigmoid(), atol=1e-6)


def test_tpr_accepts_its_share_and_gives_a_finite_threshold_behind_a_gate() -> None:
    rng = np.random.default_rng(0)
    score, correct = rng.random(200), rng.random(200) < 0.8
    t = TPR(0.95).threshold(score, correct)
    assert (score[correct] >= t).mean() >= 0.95
    assert (score[correct] > t).mean() < 0.95
    gated = np.where(np.arange(200) % 2 == 0, score, -np.inf)
    assert TPR(0.95).threshold(gated, correct) == gated[np.isfinite(gated)].min()
