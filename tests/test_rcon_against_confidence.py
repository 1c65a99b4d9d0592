"""Verdicts on R-Con against the confidence of its own net."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from demur import metrics
from demur.attacks import APGD, Attack, Corruption, RejectAutoAttackEnsemble
from demur.calibrate import TPR
from demur.evaluate import LoadedRun, RecordOptions, archive, run_attack, values
from demur.metrics import Difference, Resamples
from demur.paper import verdicts as module
from demur.paper.paper_runs import StoredRuns
from demur.paper.verdicts import Verdict, measure_verdicts, verdict_section
from demur.recipes import attack
from demur.rejectors import Con, RCon
from demur.runs import Run
from tests.conftest import Command
from tests.test_cli import expect_error

IMAGES = 8
AIMED = (
    'reject-autoattack:version=fast,targets=1,criterion=AcceptedError({}, TPR(0.95, split="test"))'
)


@pytest.fixture(scope="module")
def folder(scored_source: LoadedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of a digits net with clean images, PGD and both RejectAutoAttacks."""
    home = tmp_path_factory.mktemp("verdicts")
    loaded = LoadedRun(_copy(scored_source.run, home / "net"), torch.device("cpu"))
    options = RecordOptions(n=IMAGES, keep_images=0, keep_features=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RejectAutoAttackEnsemble, "members", _short_members)
        for score in ("Con()", "RCon()"):
            text = AIMED.format(score)
            run_attack(loaded, text, attack(text, loaded.run.recipe), options)
    for severity in range(1, 6):
        spec = Corruption("fog", severity)
        run_attack(loaded, f"corruption:name=fog,severity={severity}", spec, options)
    archive(loaded, home / "runs" / "nets" / "rr", ["R-Con"])
    return home / "runs"


def _short_members(ensemble: RejectAutoAttackEnsemble) -> dict[str, Attack]:
    """One attack in place of the ensemble: verdicts are about records, however strong."""
    return {"apgd": APGD(ensemble.ball, steps=3, criterion=ensemble.criterion)}


def _copy(run: Run, target: Path) -> Run:
    shutil.copytree(run.path, target)
    return Run(target)


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Verdict]:
    return measure_verdicts(StoredRuns(folder, lambda run: None, print))  # type: ignore[arg-type,return-value]


def _one(found: list[Verdict], attack: str, measure: str) -> Verdict:
    (one,) = [v for v in found if (v.net, v.attack, v.measure) == ("nets/rr", attack, measure)]
    return one


def _attacked(folder: Path, found: list[Verdict]) -> str:
    """The label of an adversarial record of the net."""
    labels = {v.attack for v in found if v.net == "nets/rr" and v.measure == "deployed"}
    return sorted(labels - {"clean", "corruption:name=fog"})[0]


def test_each_verdict_is_the_difference_of_both_scores_on_the_record(
    folder: Path, found: list[Verdict]
) -> None:
    run, label = Run(folder / "nets" / "rr"), _attacked(folder, found)
    record = max((r for r in run.records() if r.label == label), key=lambda r: len(r.y))
    scores = [values(one, record) for one in (Con(), RCon())]
    paper = [100 * metrics.paper_stats(one, record.correct, 0.95).accuracy for one in scores]
    verdict = _one(found, label, "paper")
    assert (verdict.con, verdict.rcon) == pytest.approx(paper)
    assert verdict.difference == pytest.approx(paper[1] - paper[0])
    assert verdict.n == len(record.y)
    (path,) = map(Path, verdict.records)
    assert record.digest[:12] in path.name

    auroc = metrics.auroc_difference(scores[1], scores[0], record.correct)
    shown = _one(found, label, "auroc")
    assert (shown.difference, shown.lo, shown.hi) == pytest.approx(auroc[:3])

    (clean,) = run.records("cal")
    accuracies, errors = [], []
    for score, value in zip((Con(), RCon()), scores, strict=True):
        accept = value >= TPR(0.95).threshold(values(score, clean), clean.correct)
        accuracies.append(100 * float(record.correct[accept].mean()))
        errors.append(100 * float((accept & ~record.correct).mean()))
    deployed, accepted = (_one(found, label, measure) for measure in ("deployed", "errors"))
    assert (deployed.con, deployed.rcon) == pytest.approx(accuracies)
    assert (accepted.con, accepted.rcon) == pytest.approx(errors)
    assert errors[0] > 0


def test_the_strongest_attack_is_aimed_at_each_score(folder: Path, found: list[Verdict]) -> None:
    verdict = _one(found, "reject-autoattack", "strongest")
    shares = []
    for score in (Con(), RCon()):
        text = AIMED.format(f"{type(score).__name__}()")
        (record,) = [r for r in Run(folder / "nets" / "rr").records() if r.label == text]
        (threshold,) = record.metadata["thresholds"].values()
        errors = (values(score, record) >= threshold) & ~record.correct
        shares.append(100 * errors.mean())
    assert (verdict.con, verdict.rcon) == pytest.approx(shares)
    assert shares[0] > 0
    assert verdict.n == IMAGES
    assert len(verdict.records) == 2
    assert verdict.difference == pytest.approx(shares[1] - shares[0])
    # these records are no sample to rank
    assert not [v for v in found if v.attack.startswith("reject-") and v.measure != "strongest"]


def test_the_severities_of_a_corruption_are_one_row(found: list[Verdict]) -> None:
    verdict = _one(found, "corruption:name=fog", "paper")
    assert verdict.n == 5 * IMAGES
    assert len(verdict.records) == 5
    assert not [v for v in found if v.attack == "corruption:name=fog" and v.measure == "auroc"]


@pytest.mark.parametrize(
    ("lo", "hi", "fewer", "word"),
    [(0.1, 0.2, False, "better"), (-0.2, -0.1, False, "worse"), (-0.1, 0.1, False, "equal"),
     (0.0, 0.2, False, "equal"), (0.1, 0.2, True, "worse"), (-0.2, -0.1, True, "better")],
)  # fmt: skip
def test_the_interval_decides_the_word(lo: float, hi: float, fewer: bool, word: str) -> None:
    gap = Difference((lo + hi) / 2, lo, hi, 0.5)
    empty = Verdict("net", "pgd-10", "paper")
    assert module._decided(empty, 0.5, 0.5, gap, fewer=fewer).word == word


def test_severities_of_an_image_are_resampled_together(folder: Path) -> None:
    stored = StoredRuns(folder, lambda run: None, print)  # type: ignore[arg-type,return-value]
    pooled = stored.record(Run(folder / "nets" / "rr"), Corruption("fog"))
    assert pooled is not None
    resamples = module._resamples(pooled)
    assert (len(resamples.counts), resamples.copies) == (IMAGES, 5)
    # as if every severity were drawn by the same numbers
    plain = Resamples(np.tile(resamples.counts, (5, 1)))
    score, correct = values(RCon(), pooled), pooled.correct
    accuracies = metrics.paper_accuracy(score, correct, 0.95)
    one, other = accuracies(resamples), accuracies(plain)
    assert np.array_equal(one, other)
    one, other = (drawn.shares(correct, score >= 0.5) for drawn in (resamples, plain))
    assert np.array_equal(one, other)


def test_the_page_shows_every_row_and_the_missing_commands(found: list[Verdict]) -> None:
    page = verdict_section(found, "runs")
    assert "| nets/rr | clean | " in page
    assert "| nets/rr | 8 | " in page
    assert "CCAT, RR; PGD-AT, RR: `demur paper table 2 --scale brief --data DATA`" in page
    without = [v for v in found if v.measure != "strongest"]
    missing = Verdict("nets/rr", "reject-autoattack", "strongest", note="demur attack RUN it")
    page = verdict_section([*without, missing], "runs")
    assert "No net has both records." in page
    assert "- nets/rr: `demur attack RUN it`" in page


def test_the_command_of_a_missing_record_can_be_typed(folder: Path) -> None:
    run = Run(folder / "nets" / "rr")
    verdict = module._strongest(run, "nets/rr", RCon(), run.records()[:1])
    assert verdict.word == "not measured"
    texts = shlex.split(verdict.note)[3:5]
    rejectors = [attack(text, run.recipe).criterion.rejector for text in texts]  # type: ignore[attr-defined]
    assert rejectors == [Con(), RCon()]


def test_the_command_prints_json_and_needs_stored_runs(
    folder: Path, found: list[Verdict], command: Command
) -> None:
    code, out, err = command("paper", "table", "verdicts", "--from", str(folder), "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert [row["word"] for row in rows] == [one.word for one in found]
    assert {"net", "attack", "measure", "con", "rcon", "lo", "hi", "records"} <= rows[0].keys()
    expect_error(command("paper", "table", "verdicts"), "made from stored runs", "--from results")
    expect_error(
        command("paper", "table", "verdicts", "--from", str(folder), "--latex"), "no LaTeX form"
    )
