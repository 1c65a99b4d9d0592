"""Other people's models: a class for refusals, a score of their own, a surrogate for it."""

import pytest
import torch
from torch import Tensor, nn

from demur.attacks import (
    APGD,
    AcceptedError,
    MinMargin,
    RejectAutoAttackEnsemble,
)
from demur.autoattack import RejectAutoAttack as RejectDropIn
from demur.balls import Linf
from demur.errors import BadInput
from demur.output import Output, as_output, prediction
from demur.rejectors import (
    Con,
    ModelScore,
)
from demur.wrappers import ModelWithScore, RejectClassModel
from tests.linear import LinearNet, centred_images


class Stairs(nn.Module):
    """A detector without a slope: its score moves in steps."""

    def forward(self, x: Tensor) -> Tensor:
        return (20 * x.flatten(1).mean(1)).round() / 20


class TestForeign:
    def k_plus_one(self, seed: int) -> nn.Module:
        net = LinearNet(seed, classes=5)

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: Tensor) -> Tensor:
                return as_output(self.net(x)).logits

        return Logits().eval()

    def test_a_class_for_refusals_decides_as_its_net_does(self) -> None:
        net, x = self.k_plus_one(5), centred_images(40, 3)
        wrapped = RejectClassModel(net)
        whole, out = net(x), wrapped(x)
        refused = whole.argmax(1) == 4
        assert torch.equal(ModelScore().rule(0.0).accepted(out), ~refused)
        assert torch.equal(prediction(out)[~refused], whole.argmax(1)[~refused])
        assert refused.any()
        assert not refused.all()

    def test_it_is_attacked_like_any_other(self) -> None:
        wrapped, x = RejectClassModel(self.k_plus_one(5)), centred_images(40, 3)
        y = prediction(wrapped(x))
        rule = AcceptedError(ModelScore(), 0.0)
        attack = RejectAutoAttackEnsemble(Linf(0.15), rule, version="fast")
        x_adv = attack(wrapped, x, y)
        accepted_errors = rule(wrapped(x_adv), y)
        whole = as_output(wrapped.model(x_adv)).logits.argmax(1)
        assert torch.equal(accepted_errors, (whole != y) & (whole != 4))
        assert accepted_errors.sum() > 5

    def test_a_surrogate_lends_its_slope_and_nothing_else(self) -> None:
        net, x = LinearNet(0), centred_images(8)
        flat = ModelWithScore(net, Stairs())
        lent = ModelWithScore(net, Stairs(), surrogate=lambda images: images.flatten(1).mean(1))
        assert torch.equal(flat(x).aux, lent(x).aux)
        x = x.requires_grad_()
        (gradient_only,) = torch.autograd.grad(lent(x).aux[:, -1].sum(), x)
        assert torch.allclose(gradient_only, torch.full_like(gradient_only, 1 / 25))

    def test_a_surrogate_finds_what_a_flat_score_hides(self) -> None:
        net, x = LinearNet(5), centred_images(24, 5)
        y = (prediction(net(x)) + 1) % 4
        rule = AcceptedError(ModelScore(), 0.6)  # the mean must rise to 0.575
        plain, lent = (
            APGD(Linf(0.15), objective=MinMargin(rule), criterion=rule)(wrapped, x, y)
            for wrapped in (
                ModelWithScore(net, Stairs()),
                ModelWithScore(net, Stairs(), surrogate=lambda images: images.flatten(1).mean(1)),
            )
        )
        judge = ModelWithScore(net, Stairs())
        assert rule(judge(lent), y).sum() > rule(judge(plain), y).sum() + 5

    def test_what_is_no_score_is_refused(self) -> None:
        net, x = LinearNet(), centred_images(4)
        with pytest.raises(BadInput, match="one value per image"):
            ModelWithScore(net, lambda images: images.flatten(1))(x)
        with pytest.raises(BadInput, match="at least three logits"):
            RejectClassModel(lambda images: images.flatten(1)[:, :2])(x)
        with pytest.raises(BadInput, match="ModelWithScore"):
            ModelScore()(Output(torch.zeros(2, 3), torch.zeros(2, 0), torch.zeros(2, 0)))

    def test_modes_follow_the_model(self) -> None:
        assert not RejectClassModel(self.k_plus_one(5)).training
        assert ModelWithScore(LinearNet().train(), Stairs()).training

    def test_the_known_interface_serves_rejecting_models_too(self) -> None:
        net, x = LinearNet(0), centred_images(20, 4)
        y = prediction(net(x))
        rule = AcceptedError(Con(), 0.5)
        made = RejectDropIn(net, rule, eps=0.1, version="fast", verbose=False)
        found = made.run_standard_evaluation(x, y, bs=6)
        index = torch.arange(20)
        spec = RejectAutoAttackEnsemble(Linf(0.1), rule, version="fast")
        assert torch.allclose(torch.as_tensor(found), spec(net, x, y, index), atol=1e-9)
        with pytest.raises(BadInput, match="a number as its threshold"):
            from demur.calibrate import TPR

            RejectDropIn(net, AcceptedError(Con(), TPR(0.95)))
