"""Wrapped models: a reject class, an external score, and a surrogate of it."""

import pytest
import torch
from torch import Tensor, nn

from demur.attacks import APGD, AcceptedError, MinMargin, RejectAutoAttackEnsemble
from demur.attacks.balls import Linf
from demur.attacks.wrappers import ModelWithScore, RejectClassModel
from demur.audits.ensembles import RejectAutoAttack
from demur.errors import BadInput
from demur.output import Output, as_output, prediction
from demur.rejectors import Con, ModelScore
from tests.linear import LinearNet, centred_images


class StepScore(nn.Module):
    """A detector with zero gradient: its score is a step function."""

    def forward(self, x: Tensor) -> Tensor:
        return (20 * x.flatten(1).mean(1)).round() / 20


class TestWrappedModels:
    def reject_class_net(self, seed: int) -> nn.Module:
        net = LinearNet(seed, classes=5)

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: Tensor) -> Tensor:
                return as_output(self.net(x)).logits

        return Logits().eval()

    def test_reject_class_model_decides_as_its_net(self) -> None:
        net, x = self.reject_class_net(5), centred_images(40, 3)
        wrapped = RejectClassModel(net)
        logits, out = net(x), wrapped(x)
        rejected = logits.argmax(1) == 4
        assert torch.equal(ModelScore().rule(0.0).accepted(out), ~rejected)
        assert torch.equal(prediction(out)[~rejected], logits.argmax(1)[~rejected])
        assert rejected.any()
        assert not rejected.all()

    def test_reject_class_model_can_be_attacked(self) -> None:
        wrapped, x = RejectClassModel(self.reject_class_net(5)), centred_images(40, 3)
        y = prediction(wrapped(x))
        rule = AcceptedError(ModelScore(), 0.0)
        attack = RejectAutoAttackEnsemble(Linf(0.15), rule, version="fast")
        x_adv = attack(wrapped, x, y)
        accepted_errors = rule(wrapped(x_adv), y)
        label = as_output(wrapped.model(x_adv)).logits.argmax(1)
        assert torch.equal(accepted_errors, (label != y) & (label != 4))
        assert accepted_errors.sum() > 5

    def test_a_surrogate_provides_the_gradient_only(self) -> None:
        net, x = LinearNet(0), centred_images(8)
        plain = ModelWithScore(net, StepScore())
        with_surrogate = ModelWithScore(
            net, StepScore(), surrogate=lambda images: images.flatten(1).mean(1)
        )
        assert torch.equal(plain(x).aux, with_surrogate(x).aux)
        x = x.requires_grad_()
        (grad,) = torch.autograd.grad(with_surrogate(x).aux[:, -1].sum(), x)
        assert torch.allclose(grad, torch.full_like(grad, 1 / 25))

    def test_a_surrogate_finds_more_than_a_score_without_gradient(self) -> None:
        net, x = LinearNet(5), centred_images(24, 5)
        y = (prediction(net(x)) + 1) % 4
        rule = AcceptedError(ModelScore(), 0.6)  # the mean must rise to 0.575
        plain, with_surrogate = (
            APGD(Linf(0.15), objective=MinMargin(rule), criterion=rule)(wrapped, x, y)
            for wrapped in (
                ModelWithScore(net, StepScore()),
                ModelWithScore(
                    net, StepScore(), surrogate=lambda images: images.flatten(1).mean(1)
                ),
            )
        )
        model = ModelWithScore(net, StepScore())
        assert rule(model(with_surrogate), y).sum() > rule(model(plain), y).sum() + 5

    def test_invalid_scores_and_logits_raise(self) -> None:
        net, x = LinearNet(), centred_images(4)
        with pytest.raises(BadInput, match="one value per image"):
            ModelWithScore(net, lambda images: images.flatten(1))(x)
        with pytest.raises(BadInput, match="at least three logits"):
            RejectClassModel(lambda images: images.flatten(1)[:, :2])(x)
        with pytest.raises(BadInput, match="ModelWithScore"):
            ModelScore()(Output(torch.zeros(2, 3), torch.zeros(2, 0), torch.zeros(2, 0)))

    def test_the_mode_follows_the_model(self) -> None:
        assert not RejectClassModel(self.reject_class_net(5)).training
        assert ModelWithScore(LinearNet().train(), StepScore()).training

    def test_reject_autoattack_equals_its_ensemble(self) -> None:
        net, x = LinearNet(0), centred_images(20, 4)
        y = prediction(net(x))
        rule = AcceptedError(Con(), 0.5)
        attack = RejectAutoAttack(net, rule, eps=0.1, version="fast", verbose=False)
        found = attack.run_standard_evaluation(x, y, bs=6)
        index = torch.arange(20)
        spec = RejectAutoAttackEnsemble(Linf(0.1), rule, version="fast")
        assert torch.allclose(torch.as_tensor(found), spec(net, x, y, index), atol=1e-9)
        with pytest.raises(BadInput, match="a number as its threshold"):
            from demur.calibrate import TPR

            RejectAutoAttack(net, AcceptedError(Con(), TPR(0.95)))
