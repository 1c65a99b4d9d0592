"""Where the paper's reference code decides: how it keeps restarts, counts failures and selects."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur.attacks import CE, CW, PGD, MultiTarget, TargetedMargin
from demur.attacks.balls import Linf
from demur.attacks.objectives.classification import wrong_classes
from demur.evaluate import LoadedRun, run_attack
from demur.evaluate.score import summary
from demur.noise import derive_seed
from demur.output import as_output
from demur.recipes import RECIPES, attack
from demur.spec import digest


def small_net(x: Tensor) -> Tensor:
    """Logits of four classes."""
    weights = torch.linspace(-1, 1, 48).cos().mul(7).sin().view(12, 4)
    return (x.flatten(1) @ weights).tanh() @ weights[:4]


def images(count: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.linspace(0, 40, count * 12).sin().add(1).div(2).view(count, 3, 2, 2)
    return x, torch.arange(count) % 4


def test_multi_target_keeps_the_largest_cross_entropy_over_targets_and_restarts() -> None:
    net, (x, y) = small_net, images()
    inner = PGD(Linf(0.2), steps=3, objective=TargetedMargin())
    each = MultiTarget(inner, restarts=3)
    x_adv = each(net, x, y)
    targets = wrong_classes(net(x), y)
    losses = []
    for number in range(9):
        stream = derive_seed(0, number)
        one = inner.perturb(net, x, y, torch.arange(16), stream, targets[number % 3])
        losses.append(CE()(as_output(net(one)), y))
    assert torch.equal(CE()(as_output(net(x_adv)), y), torch.stack(losses).amax(0))
    assert not torch.equal(x_adv, MultiTarget(replace(inner, restarts=3))(net, x, y)), (
        "restarts within the attack are compared by its own objective"
    )


def test_one_restart_is_the_same_attack_as_before() -> None:
    named = attack("multi-target:restarts=1", RECIPES["cifar10-pgdat-rr"])
    assert digest(named).startswith("789794b8")
    assert attack("multi-target", RECIPES["cifar10-pgdat-rr"]).restarts == 20  # type: ignore[attr-defined]


class Fickle(nn.Module):
    """Two classes, split at grey; a gradient query rounds otherwise than a forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        margin = (x - 0.5).flatten(1).sum(1) + 3e-3 * torch.is_grad_enabled()
        return torch.stack([margin, -margin], 1)


@torch.no_grad()
def test_the_verdict_that_a_search_confirmed_is_the_one_reported() -> None:
    model, (x, _) = Fickle(), images()
    y = model(x).argmax(1)
    found = CW("L2", searches=5, steps=60, rate=0.05, constant=1.0).distances(model, x, y)
    assert found.broken.all(), "an image may go as far as it needs"
    assert np.isfinite(found.distance.numpy()).all()
    assert (model(found.x_adv).argmax(1) != y).all(), "the margin covers both roundings"
    y = torch.zeros_like(y)
    found = CW("L2", searches=1, steps=1).distances(model, x, y)
    assert torch.equal(found.broken, model(x).argmax(1) != y), "wrong before, or not found"
    assert torch.equal(found.distance.isinf(), ~found.broken)


def test_the_artefact_check_sees_an_attack_that_stops_at_the_first_success(
    own_source: LoadedRun,
) -> None:
    recipe = own_source.run.recipe
    stops, goes_on = (
        summary(run_attack(own_source, text, attack(text, recipe)))
        for text in ("pgd-20:keep=success,step_size=0.01", "pgd-20:step_size=0.01")
    )
    assert "it stops at the first success" in stops.artefact
    assert stops.just_past > 4 * stops.just_before
    assert goes_on.artefact == ""
    assert goes_on.just_past == pytest.approx(goes_on.just_before, abs=30)
