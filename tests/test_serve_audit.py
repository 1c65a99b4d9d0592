"""Audits of a guard behind a real `demur serve`: decisions, rejections, limits, rate, resuming."""

import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from demur import Guard
from demur.attacks import HopSkipJump, RayS, Square, autoattack
from demur.audits import audit, flags, queries
from demur.audits.model_loading import load_model
from demur.audits.queries import Queries
from demur.errors import BadInput
from demur.output import as_output
from tests.conftest import Command
from tests.test_serve_load import start_service

Batch = tuple[Tensor, Tensor]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def address(tiny_guard: Guard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service, which takes eight images of a request."""
    folder = str(tiny_guard.save(tmp_path_factory.mktemp("service") / "guard"))
    process, port = start_service(folder, ["--max-images", "8"])
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    process.wait()


@pytest.fixture(autouse=True)
def few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    for attack in (Square, HopSkipJump, RayS):
        monkeypatch.setattr(autoattack, attack.__name__, partial(attack, queries=10))
    monkeypatch.setattr(autoattack, "decision_attacks", lambda *given: {})
    monkeypatch.setitem(autoattack.VERSIONS, "black-box", (("square", 1),))
    for name, number in {"REPEATS": 4, "BISECTIONS": 2, "FINER": 3, "RAY_POINTS": 5}.items():
        monkeypatch.setattr(flags, name, number)


def test_labels_and_rejections_are_those_of_the_guard(
    address: str, tiny_guard: Guard, batch: Batch
) -> None:
    out = as_output(load_model(address)(batch[0]))
    expected = tiny_guard(batch[0].permute(0, 2, 3, 1).numpy())
    assert np.array_equal(out.logits.argmax(1), expected.labels)
    assert 0 < expected.accepted.sum() < len(expected.accepted)
    assert np.array_equal(out.aux[:, -1] >= 0, expected.accepted)


def test_an_audit_counts_accepted_errors(address: str, tiny_guard: Guard, batch: Batch) -> None:
    x, y = (part[:9] for part in batch)
    y = torch.where(
        torch.arange(len(y)) % 2 == 0, y, (y + 1) % 10
    )  # accepted errors without attack
    report = audit(address, x, y, eps=0.1)
    result = report.accepted_errors
    assert result is not None
    assert [member.name for member in result.members] == ["square"]
    assert any("without gradients" in sentence for sentence in report.warnings)
    attacked = tiny_guard(result.x_adv.permute(0, 2, 3, 1).numpy())
    wrong = torch.from_numpy(attacked.accepted & (attacked.labels != y.numpy()))
    assert len(y) - result.unbroken == int(wrong.sum()) > 0
    clean = tiny_guard(x.permute(0, 2, 3, 1).numpy())
    assert np.array_equal(result.clean_accepted, clean.accepted)


def test_the_command_keeps_its_rate_and_resumes(
    address: str, batch: Batch, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (part[:9].numpy() for part in batch)
    np.savez(tmp_path / "images.npz", x=x, y=y)
    asked, answer = list[tuple[float, int]](), queries._answer

    def counted(url: str, document: dict[str, list[object]] | None) -> object:
        if document is not None:
            asked.append((time.monotonic(), len(document["images"])))
        return answer(url, document)

    monkeypatch.setattr(queries, "_answer", counted)
    state = str(tmp_path / "state")
    words = (
        "audit", address, "--data", str(tmp_path / "images.npz"), "--eps", "0.1", "--json",
        "--state", state,
    )  # fmt: skip
    code, _, said = command(*words, "--budget", "60", "--rate", "400")
    assert code == 2
    assert "the budget of 60 queries is spent" in said
    first = sum(count for _, count in asked)
    assert max(count for _, count in asked) == 9  # refused, then in parts of at most eight
    seconds = asked[-1][0] - asked[0][0]
    assert seconds >= (first - 30) / 400
    asked.clear()
    report = json.loads(command(*words)[1])
    assert report["accepted_errors"]["n"] == 9
    whole = sum(count for _, count in asked)
    asked.clear()
    again = json.loads(command(*words)[1])
    assert asked == []  # everything is in the log
    assert whole > 60
    assert again["accepted_errors"]["broken_by"] == report["accepted_errors"]["broken_by"]


def test_what_cannot_be_audited_is_said(
    address: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(10, 1, 9, 9)
    with pytest.raises(BadInput, match="422"):
        audit(address, x, batch[1][:10], eps=0.1)
    monkeypatch.setattr(queries, "TRIES", 1)
    with pytest.raises(BadInput, match="budget"):
        audit(load_model(address, queries=Queries(budget=5)), *batch, eps=0.1)
