"""PGD compared with foolbox and torchattacks on the same net and images."""

import pytest
import torch

from demur.attacks import PGD
from demur.attacks.balls import L2, Ball, Linf
from demur.data import Images
from demur.output import prediction
from tests.quick_net import QuickNet
from tests.samples import Samples

STEPS = 20


def _correct(net: QuickNet, x_adv: torch.Tensor, y: torch.Tensor) -> int:
    return int((prediction(net(x_adv)) == y).sum())


@pytest.mark.parametrize("ball", [Linf(0.1), L2(0.5)], ids=["Linf", "L2"])
def test_at_least_as_strong_as_foolbox(
    ball: Ball, quick_net: QuickNet, test_images: Images, samples: Samples
) -> None:
    foolbox = pytest.importorskip("foolbox", reason="pip install foolbox")
    x, y = test_images.batch(slice(0, samples(200, len(test_images))))
    peer = foolbox.attacks.LinfPGD if isinstance(ball, Linf) else foolbox.attacks.L2PGD
    model = foolbox.PyTorchModel(quick_net.classifier().eval(), bounds=(0, 1), device="cpu")
    step = ball.eps / 4
    _, theirs, _ = peer(steps=STEPS, abs_stepsize=step)(model, x, y, epsilons=ball.eps)
    ours = PGD(ball, steps=STEPS, step_size=step)(quick_net, x, y)
    assert _correct(quick_net, ours, y) <= _correct(quick_net, theirs, y) + len(x) // 100


@pytest.mark.parametrize("ball", [Linf(0.1), L2(0.5)], ids=["Linf", "L2"])
def test_at_least_as_strong_as_torchattacks(
    ball: Ball, quick_net: QuickNet, test_images: Images, samples: Samples
) -> None:
    torchattacks = pytest.importorskip(
        "torchattacks", reason="pip install --no-deps torchattacks", exc_type=ImportError
    )
    x, y = test_images.batch(slice(0, samples(200, len(test_images))))
    peer = torchattacks.PGD if isinstance(ball, Linf) else torchattacks.PGDL2
    step = ball.eps / 4
    theirs = peer(quick_net.classifier().eval(), eps=ball.eps, alpha=step, steps=STEPS)(x, y)
    ours = PGD(ball, steps=STEPS, step_size=step)(quick_net, x, y)
    assert _correct(quick_net, ours, y) <= _correct(quick_net, theirs, y) + len(x) // 100
