"""The zoo of broken defences: an audit catches them, and leaves adversarial training alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from demur.attacks import APGD, MaxMinMargin, autoattack
from demur.rejectors import Con
from zoo.defences import BROKEN, SOUND, Defence
from zoo.run import Row, audited

ROOT = Path(__file__).parents[2]
N = 40


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoattack, "APGD", partial(APGD, steps=10))
    monkeypatch.setattr(
        autoattack, "MaxMinMargin",
        lambda ball, criterion, seed, **_: MaxMinMargin(ball, criterion, steps=5, seed=seed),
    )  # fmt: skip


def row(name: str, make: Callable[[], Defence], rejector: Con | None = None) -> Row:
    return audited(name, make(), N, "fast", rejector)


def test_masked_gradients_are_caught() -> None:
    found = row("saturation", BROKEN["saturation"])
    assert found.claimed > 0.5  # plain PGD does not move
    assert found.audited < found.claimed - 0.2  # attacks that follow logits do
    found = row("discretisation", BROKEN["discretisation"])
    assert "gradients are zero" in found.caught_by


@pytest.mark.exhaustive
def test_a_net_of_jumps_is_flagged_though_no_gradient_attack_breaks_it() -> None:
    found = row("jump activations", BROKEN["jump activations"])
    assert {"gradients are zero", "accuracy is left at a large eps"} <= set(found.caught_by)


def test_a_detector_with_steps_is_caught() -> None:
    found = row("detector with steps", BROKEN["detector with steps"])
    assert "scores are tied" in found.caught_by
    assert "the gradient is not the slope of the objective" in found.caught_by


@pytest.fixture(scope="module")
def sound() -> Defence:
    """An adversarially trained net."""
    return next(iter(SOUND.values()))()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rejector", [None, Con()])
def test_adversarial_training_is_not_flagged(sound: Defence, rejector: Con | None) -> None:
    found = row("PGD-AT", lambda: sound, rejector)
    assert found.caught_by == []
    assert found.audited > 0.2


def test_the_page_holds_every_defence_and_all_are_caught() -> None:
    page = (ROOT / "docs" / "zoo.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if "| " in line}
    assert {*BROKEN, *SOUND} <= set(rows)
    assert all("| nothing |" not in rows[name] for name in BROKEN)
    assert all(rows[name].endswith("| nothing |") for name in SOUND)
