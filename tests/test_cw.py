"""Carlini-Wagner: closed-form distances, peers, and criteria with a rejector."""

import warnings
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from demur.attacks import AcceptedError, FalseRejection, MultiTarget
from demur.attacks.cw import CW, to_pixels, to_tanh_space
from demur.attacks.driver import SuccessMargins
from demur.data import Images
from demur.output import prediction
from demur.rejectors import Con, Coupled, Energy, RCon
from demur.rejectors.rule import as_score
from tests.linear import LinearNet, centred_images, distance
from tests.quick_net import QuickNet

Norm = Literal["L2", "Linf", "Linf-adam"]
NORMS: tuple[Norm, ...] = ("L2", "Linf", "Linf-adam")
FAST = CW("L2", searches=3, steps=60, rate=0.04, constant=1.0)
QUICK = CW("L2", searches=2, steps=30, rate=0.1, constant=20.0)
EXAMPLES: dict[str, CW] = {
    **{norm: CW(norm, searches=2, steps=15, rate=0.08, constant=1.0) for norm in NORMS},
    "accepted-error": CW("L2", 2, 15, 0.08, 1.0, criterion=AcceptedError(RCon(), 0.4)),
    "confident": CW("L2", 2, 15, 0.08, 1.0, confidence=1.0, abort=False),
}


@pytest.mark.parametrize("name", EXAMPLES)
class TestContract:
    def test_a_changed_image_is_a_success_and_others_are_unchanged(
        self, name: str, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
    ) -> None:
        x, y = batch
        found = EXAMPLES[name].distances(quick_net, x, y)
        changed = (found.x_adv != x).flatten(1).any(1)
        assert found.broken[changed].all()
        assert torch.equal(found.distance.isfinite(), found.broken)
        assert (found.distance[~changed & found.broken] == 0).all()


@pytest.mark.parametrize(("norm", "slack"), [("L2", 1.01), ("Linf", 1.05), ("Linf-adam", 1.12)])
def test_finds_the_distance_of_a_linear_net(norm: Norm, slack: float) -> None:
    net, x = LinearNet(), centred_images(6)
    y = prediction(net(x))
    steps = 150 if norm == "Linf-adam" else 80
    found = CW(norm, searches=5, steps=steps, rate=0.01).distances(net, x, y)
    optimum = distance(net, x, y, norm[:4])
    size = found.distance.sqrt() if norm == "L2" else found.distance
    assert found.broken.all()
    assert (size >= optimum * (1 - 1e-6)).all()
    assert (size <= slack * optimum).all(), (size / optimum).tolist()


def test_finds_examples_as_close_as_foolbox_and_torchattacks(
    quick_net: QuickNet, test_images: Images
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks
        from foolbox.attacks.carlini_wagner import L2CarliniWagnerAttack
        from foolbox.models.pytorch import PyTorchModel
    x, y = test_images.batch(slice(0, 24))
    model = quick_net.classifier().eval()
    box = PyTorchModel(model, bounds=(0, 1))
    peer = L2CarliniWagnerAttack(3, 40, stepsize=0.04, initial_const=1.0)
    images = [
        replace(FAST, steps=40)(quick_net, x, y),
        peer(box, x, y, epsilons=None)[0],
        torchattacks.CW(model, c=1, steps=120, lr=0.04)(x, y),
    ]
    success = torch.stack([prediction(quick_net(found)) != y for found in images])
    shared = success.all(0)
    ours, *theirs = (float((a - x)[shared].square().sum() / shared.sum()) for a in images)
    assert success[0].sum() >= success[1:].sum(1).max()
    assert ours <= 1.02 * min(theirs), (ours, theirs)


def test_minimising_linf_gives_smaller_linf_distances(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (part[:6] for part in batch)
    far, near = (
        replace(FAST, norm=norm, searches=2, steps=40)(quick_net, x, y)
        .sub(x)
        .flatten(1)
        .abs()
        .amax(1)
        .mean()
        for norm in ("L2", "Linf")
    )
    assert near < 0.9 * far


@pytest.mark.parametrize("rejector", [RCon(), Coupled()], ids=repr)
def test_accepted_errors_are_farther_away_than_misclassification(
    rejector: RCon | Coupled, quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (part[:12] for part in batch)
    with torch.no_grad():
        t = float(as_score(rejector)(quick_net(x)).median())  # the paper's threshold
    normal = QUICK.distances(quick_net, x, y)
    rule = AcceptedError(rejector, t)
    adaptive = replace(QUICK, criterion=rule).distances(quick_net, x, y)
    changed = (adaptive.x_adv != x).flatten(1).any(1)
    assert rule(quick_net(adaptive.x_adv), y)[changed].all()
    both = normal.broken & adaptive.broken
    assert adaptive.broken.float().mean() > 0.5, "most images have an accepted error"
    assert normal.broken.sum() >= adaptive.broken.sum()
    assert adaptive.distance[both].mean() >= normal.distance[both].mean()


def test_a_rule_that_accepts_nothing_returns_clean_images(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    attack = replace(FAST, searches=2, steps=20, criterion=AcceptedError(RCon(), 2.0))
    for norm in NORMS:
        found = replace(attack, norm=norm).distances(quick_net, x, y)
        assert torch.equal(found.x_adv, x)
        assert not found.broken.any()
        assert found.distance.isinf().all()


def test_correct_predictions_can_be_made_rejected(
    quick_net: QuickNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (part[:12] for part in batch)
    rule = FalseRejection(Con(), 0.6)
    found = replace(FAST, searches=3, criterion=rule).distances(quick_net, x, y)
    right = prediction(quick_net(x)) == y
    assert found.broken[right].float().mean() > 0.8
    assert rule(quick_net(found.x_adv), y)[found.broken].all()


def test_a_target_is_reached_with_the_required_confidence() -> None:
    net, x = LinearNet(), centred_images(6)
    y = prediction(net(x))
    target, index = (y + 1) % 4, torch.arange(6)
    attack = CW(steps=50, rate=0.04, confidence=0.5, searches=5)
    logits = net(attack.perturb(net, x, y, index, target=target)).logits
    first, second = logits.topk(2).values.unbind(-1)
    assert torch.equal(logits.argmax(-1), target)
    assert (first - second >= 0.5).all()
    multi_target = MultiTarget(replace(FAST, steps=40), keep="success")
    assert (prediction(net(multi_target(net, x, y))) != y).all()


def test_misclassified_images_are_returned_unchanged() -> None:
    net, x = LinearNet(), centred_images(4)
    y = (prediction(net(x)) + 1) % 4
    found = FAST.distances(net, x, y)
    assert torch.equal(found.x_adv, x)
    assert found.broken.all()
    assert (found.distance == 0).all()


def test_tanh_space_is_invertible_and_extreme_pixels_can_move() -> None:
    x = torch.tensor([0.0, 1e-3, 0.5, 1.0])
    assert torch.allclose(to_pixels(to_tanh_space(x)), x, atol=1e-6)
    assert (to_pixels(to_tanh_space(x) * 0.98)[[0, 3]] - x[[0, 3]]).abs().min() > 1e-3


def test_the_hinge_adds_logit_and_accept_margins() -> None:
    net, x = LinearNet(), centred_images(5)
    out, y = net(x), prediction(net(x))
    first, second = out.logits.topk(2).values.unbind(-1)
    rule = AcceptedError(Energy(), 50.0)
    plain, with_rule = (SuccessMargins(c)(out, y) for c in (CW().criterion, rule))
    assert torch.allclose(plain, first - second, atol=1e-3)
    assert torch.allclose(with_rule - plain, 50 - Energy()(out), atol=1e-3)
