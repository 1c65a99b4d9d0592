"""Certificates: issued on cal images only, stored unchanged, and retested on every record."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from demur import Guard
from demur.attacks import PGD, AcceptedError, Clean, WorstScore
from demur.attacks.balls import Linf
from demur.calibrate import TPR, Coverage, Risk, Uncertified
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, archive, run_attack
from demur.evaluate.binding import other_aim
from demur.evaluate.certificates import (
    IssuedCertificate,
    issue,
    issued_certificates,
    retest,
    retests,
)
from demur.files.checked_files import write_json
from demur.guards.export import model_card
from demur.metrics import Interval
from demur.rejectors import Con, Coupled, RCon
from demur.rejectors.certainty import con, rcon
from demur.report.scored_runs import cells, certificate_text, retest_table
from demur.runs import Run
from tests.conftest import Command

WEAK = PGD(Linf(0.05), steps=3)


@pytest.fixture(scope="module")
def loaded(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    copy = shutil.copytree(tiny_run.path, tmp_path_factory.mktemp("certified") / "run")
    loaded = LoadedRun(Run(Path(copy)), torch.device("cpu"))
    run_attack(loaded, "clean", Clean())
    run_attack(loaded, "pgd-3", PGD(Linf(0.3), steps=3))
    return loaded


@pytest.fixture(scope="module")
def coupled(loaded: LoadedRun) -> IssuedCertificate:
    return issue(loaded, "Con+R-Con", TPR(0.6), 0.9)


def test_a_certificate_has_metadata(loaded: LoadedRun, coupled: IssuedCertificate) -> None:
    metadata = coupled.metadata
    assert metadata["split"] == "cal"
    assert metadata["cal_record"] == loaded.clean("cal").digest
    assert metadata["data"] == loaded.clean("cal").metadata["data"]
    assert metadata["weights"] == loaded.run.checkpoint["weights"]
    assert metadata["pilot"] + metadata["n"] == metadata["cal_images"]
    assert metadata["cal_images"] == len(loaded.clean("cal").y)
    expected = {"level": 0.6, "confidence": 0.9, "quantity": "tpr"}
    assert expected.items() <= metadata.items()
    assert metadata["rejector_spec"].startswith("Coupled(")
    assert metadata["valid_for"] == "clean images of the same distribution"
    assert metadata["sentence"] in certificate_text(coupled)


def test_a_certificate_is_read_back_unchanged(
    loaded: LoadedRun, coupled: IssuedCertificate
) -> None:
    (found,) = [made for made in issued_certificates(loaded.run) if made.rejector == "Con+R-Con"]
    assert {k: v for k, v in found.metadata.items() if k != "metadata_digest"} == coupled.metadata
    again = issue(loaded, "Con+R-Con", TPR(0.6), 0.9)
    assert again.metadata["created"] == coupled.metadata["created"], (
        "the same certificate is not issued twice"
    )
    assert len([m for m in issued_certificates(loaded.run) if m.rejector == "Con+R-Con"]) == 1


def test_both_thresholds_of_the_coupled_rule_are_used(
    loaded: LoadedRun, coupled: IssuedCertificate
) -> None:
    record = loaded.run.records()[0]
    line = retest(coupled, RejectorEvaluation.of(loaded).scores["Con+R-Con"], record)
    first, second = coupled.thresholds
    out = record.output
    taken = ((con(out).double() >= first) & (rcon(out).double() >= second)).numpy()
    assert (line.hits, line.trials) == (taken[record.correct].sum(), record.correct.sum())
    assert line.coverage == taken.mean()
    assert line.observed is not None
    assert line.interval.lo <= line.observed <= line.interval.hi


def test_every_record_is_retested(loaded: LoadedRun, coupled: IssuedCertificate) -> None:
    records = loaded.run.records()
    certificates_and_retests = retests(loaded, RejectorEvaluation.of(loaded).scores, records)
    ((made, lines),) = [t for t in certificates_and_retests if t[0].rejector == "Con+R-Con"]
    assert made.metadata["sentence"] == coupled.metadata["sentence"]
    assert [(line.attack, line.covered) for line in lines] == [("clean", True), ("pgd-3", False)]
    assert lines[0].verdict == "kept"
    table = retest_table([(made, lines)])
    assert table.row_count == 1 + len(lines)
    assert [line.to_json()["verdict"] for line in lines] == [line.verdict for line in lines]


@pytest.mark.parametrize("guarantee", [Risk(0.4), TPR(0.5), Coverage(0.5)], ids=repr)
@pytest.mark.parametrize("name", ["Con", "GDA"])
def test_the_observed_share_is_the_guaranteed_quantity(
    loaded: LoadedRun, guarantee: Risk | TPR | Coverage, name: str
) -> None:
    made = issue(loaded, name, guarantee, 0.8)
    record = loaded.run.records()[0]
    score = RejectorEvaluation.of(loaded).scores[name]
    line = retest(made, score, record)
    value = score(record.output).double().numpy()
    taken, right = value >= made.thresholds[0], record.correct
    share = {
        "risk": (taken & ~right).sum() / max(1, taken.sum()),
        "tpr": taken[right].mean(),
        "coverage": taken.mean(),
    }[made.metadata["quantity"]]
    assert line.observed == pytest.approx(share)
    assert line.level == guarantee.level


def test_a_certificate_on_adversarial_examples_covers_that_attack_only(loaded: LoadedRun) -> None:
    made = issue(loaded, "Con", Coverage(0.3), 0.8, "weak", WEAK)
    assert made.metadata["valid_for"].startswith("images attacked by PGD(ball=Linf(eps=0.05)")
    assert made.metadata["attack_spec"].startswith("PGD(")
    record = run_attack(loaded, "weak", WEAK)
    others = [r for r in loaded.run.records() if r.digest != record.digest]
    assert made.covers(record)
    assert not any(made.covers(other) for other in others)


def test_the_verdict_depends_on_the_interval() -> None:
    from demur.evaluate.certificates import _verdict

    assert _verdict(None, Interval(0, 1), 0.05, is_upper_bound=True) == "nothing accepted"
    assert _verdict(0.05, Interval(0.03, 0.08), 0.05, is_upper_bound=True) == "kept"
    assert _verdict(0.06, Interval(0.04, 0.08), 0.05, is_upper_bound=True) == "within chance"
    assert _verdict(0.09, Interval(0.06, 0.12), 0.05, is_upper_bound=True) == "broken"
    assert _verdict(0.94, Interval(0.92, 0.96), 0.95, is_upper_bound=False) == "within chance"
    assert _verdict(0.9, Interval(0.88, 0.92), 0.95, is_upper_bound=False) == "broken"


def test_an_attack_with_a_threshold_from_cal_images_raises(loaded: LoadedRun) -> None:
    knowing = PGD(Linf(0.1), steps=2, keep="success", criterion=AcceptedError(Con(), TPR(0.9)))
    with pytest.raises(BadInput, match="a threshold that was chosen on the cal images"):
        issue(loaded, "Con", Coverage(0.3), 0.8, "knowing", knowing)


def test_a_certificate_with_other_thresholds_is_not_overwritten(loaded: LoadedRun) -> None:
    made = issue(loaded, "Entropy", Coverage(0.5), 0.8)
    (path,) = (loaded.run.path / "certificates").glob("Entropy*")
    write_json(path, made.metadata | {"thresholds": [0.125]})
    with pytest.raises(BadInput, match="has the same guarantee with other thresholds"):
        issue(loaded, "Entropy", Coverage(0.5), 0.8)
    path.unlink()


def test_an_attack_on_another_threshold_or_rejector_is_marked(loaded: LoadedRun) -> None:
    """Its verdict "kept, but not guaranteed here" was read as comfort."""
    weak = PGD(Linf(0.1), steps=1, keep="success", criterion=AcceptedError(Con(), TPR(0.9)))
    options = RecordOptions(n=16)
    record = run_attack(loaded, "on Con", weak, options)
    (at,) = record.metadata["thresholds"].values()
    assert other_aim(record, Con(), [at]) == ""
    assert other_aim(record, Con(), [at + 0.01]) == f"aimed at threshold {at:.4g}"
    assert other_aim(record, RCon(), [at]) == "aimed at Con"
    assert other_aim(record, Coupled(Con(), 0.5, RCon()), [0.5, at]) == "aimed at Con"
    assert (
        other_aim(run_attack(loaded, "pgd", WEAK, options), Con(), [at]) == "aimed at no rejector"
    )
    worst = run_attack(loaded, "worst", WorstScore(Linf(0.1), Con(), 1, 1), options)
    assert other_aim(worst, Con(), [at]) == other_aim(loaded.clean("cal"), Con(), [at]) == ""
    line = retest(issue(loaded, "Con", Risk(0.9)), Con(), record)
    assert (line.verdict, line.aim) == ("kept", f"aimed at threshold {at:.4g}")
    assert cells(line)[-1] == f"kept, but aimed at threshold {at:.4g}"
    broken = replace(line, verdict="broken")
    assert cells(broken)[-1] == "broken, but not guaranteed here"
    guard = Guard.from_run(loaded, rejector="Con", risk=0.9, accept_chance=True)
    card = model_card(guard, None)
    assert f"| test, on Con (aimed at threshold {at:.4g}) |" in card
    assert "attack this rule with threshold=T" in card


def test_a_certificate_of_a_changed_rejector_has_no_retests(loaded: LoadedRun) -> None:
    made = issue(loaded, "MaxLogit", Coverage(0.5), 0.8)
    (path,) = (loaded.run.path / "certificates").glob("MaxLogit*")
    write_json(path, made.metadata | {"rejector_spec": "MaxLogit(tau=2.0)"})
    certificates_and_retests = retests(
        loaded, RejectorEvaluation.of(loaded).scores, loaded.run.records()
    )
    assert [lines for one, lines in certificates_and_retests if one.rejector == "MaxLogit"] == [[]]
    names = retest_table(certificates_and_retests).columns[0]._cells
    assert "not tested: its rejector" in str(names)
    path.unlink()


def test_a_rule_that_accepts_nothing_has_no_observed_risk(loaded: LoadedRun) -> None:
    made = issue(loaded, "Con", Risk(0.4), 0.8)
    rejects_all = IssuedCertificate(made.metadata | {"thresholds": [2.0]})
    line = retest(rejects_all, Con(), loaded.run.records()[0])
    assert (line.observed, line.verdict, line.coverage) == (None, "nothing accepted", 0)
    assert retest_table([(rejects_all, [line])]).row_count == 2


def test_an_impossible_guarantee_raises_and_writes_nothing(loaded: LoadedRun) -> None:
    before = sorted(p.name for p in (loaded.run.path / "certificates").glob("*"))
    with pytest.raises(Uncertified, match="no threshold gives at most"):
        issue(loaded, "Con", Risk(0.0001))
    with pytest.raises(BadInput, match="no rejector 'Cno'; did you mean Con"):
        issue(loaded, "Cno", TPR(0.5))
    assert sorted(p.name for p in (loaded.run.path / "certificates").glob("*")) == before


def test_an_archive_keeps_certificates_and_can_issue_more(
    loaded: LoadedRun, coupled: IssuedCertificate, tmp_path: Path
) -> None:
    archived = archive(loaded, tmp_path / "archive")
    assert [made.metadata for made in issued_certificates(archived)] == [
        made.metadata for made in issued_certificates(loaded.run)
    ]
    again = issue(LoadedRun(archived, torch.device("cpu")), "KD", TPR(0.5), 0.8)
    whole = issue(loaded, "KD", TPR(0.5), 0.8)
    assert np.allclose(again.thresholds, whole.thresholds)


def test_the_command_issues_stores_and_shows_a_certificate(
    loaded: LoadedRun, command: Command
) -> None:
    shutil.copytree(loaded.run.path, "runs/mine")
    code, out, err = command("calibrate", "mine", "--coverage", "0.5", "--json")
    assert code == 0, err
    metadata = json.loads(out)
    assert metadata["rejector"] == "R-Con"
    out = command("calibrate", "mine", "--risk", "0.97")[1]
    assert "accepting every score, so it rejects nothing" in out
    code, out, err = command("score", "mine", "--json")
    assert code == 0, err
    shown = [made["certificate"]["sentence"] for made in json.loads(out)["certificates"]]
    assert metadata["sentence"] in shown
    code, out, _ = command("score", "mine", "--protocol", "paper")
    assert "certificates: guaranteed on cal, observed on test" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "give exactly one of --risk, --tpr and --coverage"),
        (("--risk", "0.1", "--tpr", "0.9"), "give exactly one of"),
        (("--risk", "5"), "risk is 5; give a share between 0 and 1, such as 0.05"),
        (("--risk", "0.1", "--confidence", "1"), "confidence is 1"),
        (("--tpr", "0.9", "--rejector", "rkon"), "no rejector 'rkon'; did you mean"),
        (("--tpr", "0.9", "--attack", "pgdd"), "no attack is called 'pgdd'"),
        (("--risk", "0.0001"), "no threshold gives at most 0.01% wrong among the accepted"),
    ],
)
def test_bad_requests_get_one_sentence(
    loaded: LoadedRun, command: Command, words: tuple[str, ...], sentence: str
) -> None:
    shutil.copytree(loaded.run.path, "runs/mine")
    code, _, err = command("calibrate", "mine", *words)
    assert code == 2
    assert sentence in " ".join(err.split())
    assert "Traceback" not in err


def test_an_unknown_or_empty_split_gets_one_sentence(loaded: LoadedRun, command: Command) -> None:
    shutil.copytree(loaded.run.path, "runs/mine")
    code, _, err = command("score", "mine", "--split", "vall")
    assert code == 2
    assert "no split is called 'vall'; did you mean val" in " ".join(err.split())
    code, _, err = command("score", "mine", "--split", "val")
    assert code == 2
    assert "demur attack mine pgd-20 --split val" in " ".join(err.split())
