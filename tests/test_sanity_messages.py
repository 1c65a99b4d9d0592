"""Sanity checks end to end: nets that are flagged, and the text of the flags."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur.attacks import PGD, Clean
from demur.attacks.balls import Linf
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, archive, run_attack
from demur.evaluate.probing import PROBED, probe
from demur.nets import RejectingNet
from demur.output import Output
from demur.report.terminal import Sanity, show_sanity
from demur.runs import Record, Run
from demur.sanity import run_checks
from demur.sanity.comparisons import BEATEN, LEFT, RISES, TOO_GOOD
from demur.sanity.single_records import FLAT, NOT_RISEN, RANDOM, TIED
from tests.conftest import Command
from tests.test_sanity import SCORER, at_eps, flags


class Masked(nn.Module):
    """A net with a function applied to its logits."""

    def __init__(self, net: RejectingNet, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.mask = net, mask

    def forward(self, x: Tensor) -> Output:
        out: Output = self.net(x)
        return out._replace(logits=self.mask(out.logits))


def load_run(run: Run, path: Path, mask: Callable[[Tensor], Tensor] | None = None) -> LoadedRun:
    """A private copy of a run, with masked logits if a mask is given."""
    loaded = LoadedRun(Run(Path(shutil.copytree(run.path, path))), torch.device("cpu"))
    if mask is not None:
        loaded.__dict__["net"] = Masked(loaded.net, mask)
    return loaded


def attack_records(loaded: LoadedRun) -> list[Record]:
    options = RecordOptions(n=100, keep_features=False)
    long = PGD(Linf(0.1), steps=10)
    return [
        run_attack(loaded, "clean", Clean(), options),
        run_attack(loaded, "pgd-10:eps=0.1", long, options),
        run_attack(loaded, "pgd-10:eps=0.05", PGD(Linf(0.05), steps=10), options),
        run_attack(loaded, "pgd-10:eps=0.1,steps=2", PGD(Linf(0.1), steps=2), options),
        run_attack(loaded, "pgd-20:eps=0.6", PGD(Linf(0.6), steps=10), options),
    ]


def test_an_ordinary_net_is_not_flagged(tiny_run: Run, tmp_path: Path) -> None:
    loaded = load_run(tiny_run, tmp_path / "run")
    records = attack_records(loaded)
    found = run_checks(records, RejectorEvaluation.of(loaded))
    assert [flag for check in found for flag in check.flags] == []
    assert [check.kind for check in found if check.missing] == []
    assert all(record.metadata["probe"]["images"] == 100 for record in records)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(lambda z: 1e6 * z, id="scaled"),
        pytest.param(torch.round, id="rounded", marks=pytest.mark.exhaustive),
    ],
)
def test_a_net_with_masked_gradients_is_flagged(
    tiny_run: Run, tmp_path: Path, mask: Callable[[Tensor], Tensor]
) -> None:
    loaded = load_run(tiny_run, tmp_path / "run", mask)
    records = attack_records(loaded)
    found = {flag.kind for flag in flags(records, RejectorEvaluation.of(loaded))}
    assert {FLAT, LEFT} <= found
    archived = archive(loaded, tmp_path / "archive")
    assert [r.metadata["probe"] for r in archived.records()] == [
        r.metadata["probe"] for r in records
    ]
    loaded = LoadedRun(archived, torch.device("cpu"))
    assert {flag.kind for flag in flags(archived.records(), RejectorEvaluation.of(loaded))} == found


def test_a_net_with_random_outputs_is_detected(tiny_net: RejectingNet, batch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    noisy = Masked(tiny_net, lambda z: z + torch.randn(z.shape, generator=generator))
    x, y = batch
    assert probe(noisy, x, y)["random_outputs"] == len(x)
    assert probe(tiny_net, x, y) == {"images": len(x), "random_outputs": 0, "zero_gradients": 0}
    assert probe(tiny_net, x.repeat(9, 1, 1, 1), y.repeat(9))["images"] == PROBED


ODD_PROBE = {"images": 20, "random_outputs": 20, "zero_gradients": 0}


def test_the_probe_does_not_change_the_digest_of_a_record(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RecordOptions(n=20, keep_features=False)
    loaded = load_run(tiny_run, tmp_path / "one")
    here = run_attack(loaded, "clean", Clean(), options)
    monkeypatch.setattr("demur.evaluate.recording.probe", lambda *given: ODD_PROBE)
    there = run_attack(load_run(tiny_run, tmp_path / "two"), "clean", Clean(), options)
    assert here.digest == there.digest
    assert here.metadata["probe"] != there.metadata["probe"]
    assert np.array_equal(here.correct, there.correct)


# ------------------------------------------------------------------ text


def test_flags_are_shown_with_the_missing_command(
    tiny_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [at_eps(64 / 255, 0), at_eps(32 / 255, 100)]
    sanity = Sanity.of(run_checks(records, SCORER), tiny_run, records)
    show_sanity(sanity)
    out = capsys.readouterr().out
    (flag,) = sanity.flags
    assert "Sanity: 1 flag\n" in out
    assert f"  observed: {flag.observed}\n  remedy: {flag.remedy}\n" in out
    assert f"checked and not found: {TIED}\n" in out
    assert f"demur attack {tiny_run.path} pgd-100:eps=128/255\n" in out
    assert sanity.to_json()["sanity"] == [flag.to_json()]
    assert {each["kind"] for each in sanity.to_json()["unchecked"]} == {
        NOT_RISEN, FLAT, RANDOM, BEATEN, LEFT, TOO_GOOD,
    }  # fmt: skip


def test_score_ends_with_sanity(command: Command, tiny_run: Run, in_empty_folder: Path) -> None:
    shutil.copytree(tiny_run.path, in_empty_folder / "runs" / "tiny")
    assert command("attack", "tiny", "clean", "pgd-10:eps=0.1", "--n", "60")[0] == 0
    _, out, _ = command("score", "tiny", "--protocol", "deploy")
    assert "Sanity: Nothing was flagged" in out
    assert "demur attack tiny pgd-10:eps=0.05" in out
    _, out, _ = command("score", "tiny", "--json")
    answer = json.loads(out)
    assert answer["sanity"] == []
    assert {each["kind"] for each in answer["unchecked"]} == {RISES, LEFT, TOO_GOOD, BEATEN}
