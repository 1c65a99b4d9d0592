"""A gradient query passes through few functions on its way from the user's call to the model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import demur
from demur.attacks import Attack, MultiTarget, Square
from demur.attacks.attack import AcceptedError
from demur.audits.ensembles import RejectAutoAttack
from demur.engine import any_module
from demur.rejectors import Con

PACKAGE = str(Path(demur.__file__).parent)
MAX_FRAMES = 18
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")

stacks: list[list[str]] = []  # one for each gradient query, from the user's call to the model


class TracedNet(nn.Module):
    """A net that writes down the functions of demur that lead to its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            stacks.append(demur_frames())
        logits: Tensor = self.layers(x)
        return logits


def demur_frames() -> list[str]:
    """The functions of demur on the stack, the outermost first."""
    frame, found = sys._getframe(), list[str]()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            file = Path(code.co_filename).relative_to(PACKAGE)
            found.append(f"{file}:{frame.f_lineno} {code.co_qualname}")
    return found[::-1]


def shorter(attack: Any) -> Attack:
    """The attack with two steps, and two restarts or targets."""
    if isinstance(attack, MultiTarget):
        return replace(attack, attack=shorter(attack.attack), targets=2)
    budget = {"queries": 2} if isinstance(attack, Square) else {"steps": 2, "restarts": 2}
    short: Attack = replace(attack, **budget)
    return short


@pytest.mark.parametrize("copied", [False, True], ids=["model", "copy"])
def test_at_most_eighteen(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_module, "MAX_TIME_RATIO", 1e9 if copied else 0.0)
    stacks.clear()
    torch.manual_seed(0)
    net, x = TracedNet().eval(), torch.rand(6, 1, 8, 8)
    attack = RejectAutoAttack(net, AcceptedError(Con(), 0.26), eps=0.001, verbose=False)
    attack.chain = replace(attack.chain, attacks=tuple(map(shorter, attack.chain.attacks)))
    with torch.no_grad():
        attack.run_standard_evaluation(x, net(x).argmax(1))
    found = "\n".join(frame for stack in stacks for frame in stack)
    for member in ("APGD.step", "MaxMinMargin.step", "FAB.step", "MultiTarget.run"):
        assert member in found
    deepest = max(stacks, key=len)
    assert deepest[0].endswith("EnsembleEvaluation.run_standard_evaluation")
    assert len(deepest) <= MAX_FRAMES, "\n".join(deepest)
    assert ("copies.py" in deepest[-1]) == copied
