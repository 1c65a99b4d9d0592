"""Soft labels: their closed forms, and training with them."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demur.data import Digits
from demur.errors import BadInput
from demur.methods import ADR, PGDAT, HardLabels, Labels, LabelSmoothing, Method
from demur.output import Output
from demur.recipes import recipe
from demur.training import train
from demur.training.loop import Progress
from tests.conftest import TINIEST

Y = torch.tensor([0, 1, 2, 2])


def teacher() -> Output:
    logits = torch.tensor([[3.0, 0, 0], [2, 0, 0], [0, 0, 0], [9, 0, 0]])
    return Output(logits, logits, logits[:, :0])


def test_hard_labels_have_no_targets() -> None:
    labels: Labels = HardLabels()
    assert labels.targets(Y, 3, 0.0, None) is None


def test_smoothed_labels_spread_the_amount_over_all_classes() -> None:
    target = LabelSmoothing(0.3).targets(Y, 3, 0.0, None)
    assert torch.allclose(target[0], torch.tensor([0.8, 0.1, 0.1]))
    assert torch.allclose(target.sum(-1), torch.ones(4))


@pytest.mark.parametrize("progress", [0.0, 0.25, 1.0, torch.tensor([0.25])], ids=str)
def test_adr_mixes_the_teacher_by_its_error(progress: float | Tensor) -> None:
    cosine = (1 + math.cos(math.pi * float(progress))) / 2
    temperature, weight = 1.5 + cosine, 0.85 - 0.15 * cosine
    p = (teacher().logits / temperature).softmax(-1)
    target = ADR().targets(Y, 3, progress, teacher())
    for row, label in enumerate(Y):
        share = min(max(weight - float(p[row].max() - p[row, label]), 0.0), 1.0)
        expected = share * p[row] + (1 - share) * torch.eye(3)[label]
        assert torch.allclose(target[row], expected, atol=1e-6)
    assert torch.equal(target[3], torch.eye(3)[2]), "a confident, wrong teacher is not believed"


def test_the_loss_is_the_cross_entropy_with_the_target() -> None:
    method, made = Method(PGDAT()), recipe("digits-pgdat", ["width=4"])
    net = made.net.build(Digits().domain, method.head)
    x, y = Digits().load()["fit"].batch(slice(0, 8))
    target = LabelSmoothing(0.2).targets(y, 10, 0.0, None)
    loss = method.batch_loss(net, x, x, y, target=target)
    expected = torch.nn.functional.cross_entropy(net(x).logits, y, label_smoothing=0.2)
    assert torch.allclose(loss, expected, atol=1e-6)


def test_adr_needs_the_averaged_net_and_a_framework_with_labels() -> None:
    with pytest.raises(BadInput, match=r"set ema, such as ema=0\.995"):
        recipe("digits-trades", ["labels=ADR()"])
    made = recipe("digits-trades", ["labels=ADR()", "ema=0.9"])  # in any order
    assert made == recipe("digits-trades", ["ema=0.9", "labels=ADR()"])
    with pytest.raises(BadInput, match="CCAT makes its own targets"):
        recipe("digits-ccat", ["labels=LabelSmoothing()"])


@pytest.mark.parametrize(
    "name", ["digits-pgdat", pytest.param("digits-trades-rr", marks=pytest.mark.exhaustive)]
)
def test_training_with_soft_labels_and_strong_augmentation_resumes(
    name: str, tmp_path: Path, few_digits: None
) -> None:
    changes = [*TINIEST, "epochs=2", "ema=0.99", "labels=ADR()", "augment=IDBH()"]

    def stop(progress: Progress) -> None:
        if (progress.epoch, progress.step) == (1, 2):
            raise KeyboardInterrupt

    once = train(recipe(name, changes), tmp_path / "once")
    with pytest.raises(KeyboardInterrupt):
        train(recipe(name, changes), tmp_path / "stopped", on_progress=stop)
    resumed = train(recipe(name, changes), tmp_path / "stopped")
    hard = train(recipe(name, [*changes, "labels=HardLabels()"]), tmp_path / "hard")
    digests = [run.checkpoint["weights"] for run in (once, resumed, hard)]
    assert digests[0] == digests[1] != digests[2]
