"""Certificates: made on cal images alone, kept whole, and held against every record."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from demur.attacks import PGD, Clean, Slips
from demur.balls import Linf
from demur.calibrate import TPR, Coverage, Risk, Uncertified
from demur.errors import BadInput
from demur.evaluate import Scoring, Source, attacked, slim
from demur.evaluate.certificates import Issued, issue, issued, retested, retests
from demur.metrics import Interval
from demur.output import con, rcon
from demur.rejectors import Con
from demur.report.certificates import certificate_words, retest_table
from demur.runs import Run
from demur.runs.files import write_story
from tests.conftest import Command

WEAK = PGD(Linf(0.05), steps=3)


@pytest.fixture(scope="module")
def source(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Source:
    copy = shutil.copytree(tiny_run.path, tmp_path_factory.mktemp("promised") / "run")
    source = Source(Run(Path(copy)), torch.device("cpu"))
    attacked(source, "clean", Clean())
    attacked(source, "pgd-3", PGD(Linf(0.3), steps=3))
    return source


@pytest.fixture(scope="module")
def coupled(source: Source) -> Issued:
    return issue(source, "Con+R-Con", TPR(0.6), 0.9)


def test_a_certificate_says_what_it_rests_on(source: Source, coupled: Issued) -> None:
    told = coupled.story
    assert told["split"] == "cal"
    assert told["cal_record"] == source.clean("cal").digest
    assert told["data"] == source.clean("cal").about["data"]
    assert told["weights"] == source.run.chosen["weights"]
    assert told["pilot"] + told["n"] == told["cal_images"] == len(source.clean("cal").y)
    assert (told["level"], told["confidence"], told["about"]) == (0.6, 0.9, "tpr")
    assert told["rejector_spec"].startswith("Coupled(")
    assert told["valid_for"] == "images as they are, drawn like these"
    assert told["sentence"] in certificate_words(coupled)


def test_it_is_found_again_and_repeated_to_the_letter(source: Source, coupled: Issued) -> None:
    (found,) = [made for made in issued(source.run) if made.rejector == "Con+R-Con"]
    assert {k: v for k, v in found.story.items() if k != "story_digest"} == coupled.story
    again = issue(source, "Con+R-Con", TPR(0.6), 0.9)
    assert again.story["made"] == coupled.story["made"], "the same promise is not made twice"
    assert len([m for m in issued(source.run) if m.rejector == "Con+R-Con"]) == 1


def test_both_thresholds_of_the_coupled_rule_are_used(source: Source, coupled: Issued) -> None:
    record = source.run.records()[0]
    line = retested(coupled, Scoring.of(source).scores["Con+R-Con"], record)
    first, second = coupled.thresholds
    out = record.output
    taken = ((con(out).double() >= first) & (rcon(out).double() >= second)).numpy()
    assert (line.hits, line.trials) == (taken[record.correct].sum(), record.correct.sum())
    assert line.coverage == taken.mean()
    assert line.observed is not None
    assert line.interval.lo <= line.observed <= line.interval.hi


def test_every_record_is_held_against_the_promise(source: Source, coupled: Issued) -> None:
    records = source.run.records()
    tested = retests(source, Scoring.of(source).scores, records)
    ((made, lines),) = [t for t in tested if t[0].rejector == "Con+R-Con"]
    assert made.story["sentence"] == coupled.story["sentence"]
    assert [(line.attack, line.covered) for line in lines] == [("clean", True), ("pgd-3", False)]
    assert lines[0].word == "kept"
    table = retest_table([(made, lines)])
    assert table.row_count == 1 + len(lines)
    assert [line.plain()["word"] for line in lines] == [line.word for line in lines]


@pytest.mark.parametrize("promise", [Risk(0.4), TPR(0.5), Coverage(0.5)], ids=repr)
@pytest.mark.parametrize("name", ["Con", "GDA"])
def test_shares_are_those_of_the_promise(
    source: Source, promise: Risk | TPR | Coverage, name: str
) -> None:
    made = issue(source, name, promise, 0.8)
    record = source.run.records()[0]
    score = Scoring.of(source).scores[name]
    line = retested(made, score, record)
    value = score(record.output).double().numpy()
    taken, right = value >= made.thresholds[0], record.correct
    share = {
        "risk": (taken & ~right).sum() / max(1, taken.sum()),
        "tpr": taken[right].mean(),
        "coverage": taken.mean(),
    }[made.story["about"]]
    assert line.observed == pytest.approx(share)
    assert line.level == promise.level


def test_one_made_on_attacked_images_is_for_that_attack_only(source: Source) -> None:
    made = issue(source, "Con", Coverage(0.3), 0.8, "weak", WEAK)
    assert made.story["valid_for"].startswith("images attacked by PGD(ball=Linf(eps=0.05)")
    assert made.story["attack_spec"].startswith("PGD(")
    record = attacked(source, "weak", WEAK)
    others = [r for r in source.run.records() if r.digest != record.digest]
    assert made.covers(record)
    assert not any(made.covers(other) for other in others)


def test_words_follow_the_interval() -> None:
    from demur.evaluate.certificates import _word

    assert _word(None, Interval(0, 1), 0.05, ceiling=True) == "nothing accepted"
    assert _word(0.05, Interval(0.03, 0.08), 0.05, ceiling=True) == "kept"
    assert _word(0.06, Interval(0.04, 0.08), 0.05, ceiling=True) == "within chance"
    assert _word(0.09, Interval(0.06, 0.12), 0.05, ceiling=True) == "broken"
    assert _word(0.94, Interval(0.92, 0.96), 0.95, ceiling=False) == "within chance"
    assert _word(0.9, Interval(0.88, 0.92), 0.95, ceiling=False) == "broken"


def test_an_attack_that_knows_the_cal_images_cannot_test_them(source: Source) -> None:
    knowing = PGD(Linf(0.1), steps=2, keep="criterion", criterion=Slips(Con(), TPR(0.9)))
    with pytest.raises(BadInput, match="a threshold of its own that was chosen on the cal images"):
        issue(source, "Con", Coverage(0.3), 0.8, "knowing", knowing)


def test_a_promise_with_other_thresholds_is_not_written_over(source: Source) -> None:
    made = issue(source, "Entropy", Coverage(0.5), 0.8)
    (path,) = (source.run.path / "certificates").glob("Entropy*")
    write_story(path, made.story | {"thresholds": [0.125]})
    with pytest.raises(BadInput, match="promises the same with other thresholds"):
        issue(source, "Entropy", Coverage(0.5), 0.8)
    path.unlink()


def test_a_promise_about_a_rejector_that_changed_shows_nothing(source: Source) -> None:
    made = issue(source, "MaxLogit", Coverage(0.5), 0.8)
    (path,) = (source.run.path / "certificates").glob("MaxLogit*")
    write_story(path, made.story | {"rejector_spec": "MaxLogit(tau=2.0)"})
    tested = retests(source, Scoring.of(source).scores, source.run.records())
    assert [lines for one, lines in tested if one.rejector == "MaxLogit"] == [[]]
    assert "no record shows it" in str(retest_table(tested).columns[0]._cells)
    path.unlink()


def test_a_rule_that_accepts_nothing_has_no_observed_risk(source: Source) -> None:
    made = issue(source, "Con", Risk(0.4), 0.8)
    shut = Issued(made.story | {"thresholds": [2.0]})
    line = retested(shut, Con(), source.run.records()[0])
    assert (line.observed, line.word, line.coverage) == (None, "nothing accepted", 0)
    assert retest_table([(shut, [line])]).row_count == 2


def test_what_cannot_be_promised_is_refused_and_nothing_is_written(source: Source) -> None:
    before = sorted(p.name for p in (source.run.path / "certificates").glob("*"))
    with pytest.raises(Uncertified, match="no threshold gives at most"):
        issue(source, "Con", Risk(0.0001))
    with pytest.raises(BadInput, match="no rejector is called 'Cno'; did you mean Con"):
        issue(source, "Cno", TPR(0.5))
    assert sorted(p.name for p in (source.run.path / "certificates").glob("*")) == before


def test_a_slim_copy_keeps_promises_and_can_make_more(
    source: Source, coupled: Issued, tmp_path: Path
) -> None:
    thin = slim(source, tmp_path / "slim")
    assert [made.story for made in issued(thin)] == [made.story for made in issued(source.run)]
    again = issue(Source(thin, torch.device("cpu")), "KD", TPR(0.5), 0.8)
    whole = issue(source, "KD", TPR(0.5), 0.8)
    assert np.allclose(again.thresholds, whole.thresholds)


def test_the_command_makes_keeps_and_shows_it(source: Source, command: Command) -> None:
    shutil.copytree(source.run.path, "runs/mine")
    code, out, err = command("calibrate", "mine", "--coverage", "0.5", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["rejector"] == "R-Con"
    code, out, err = command("score", "mine", "--json")
    assert code == 0, err
    shown = [made["certificate"]["sentence"] for made in json.loads(out)["certificates"]]
    assert told["sentence"] in shown
    code, out, _ = command("score", "mine", "--protocol", "paper")
    assert "certificates: promised on cal, observed on test" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "promise one thing: give --risk, --tpr or --coverage"),
        (("--risk", "0.1", "--tpr", "0.9"), "promise one thing"),
        (("--risk", "5"), "--risk is 5; give a share between 0 and 1"),
        (("--risk", "0.1", "--confidence", "1"), "confidence is 1"),
        (("--tpr", "0.9", "--rejector", "rcon"), "no rejector is called 'rcon'; did you mean"),
        (("--tpr", "0.9", "--attack", "pgd"), "no attack is called 'pgd'"),
        (("--risk", "0.0001"), "no threshold gives at most 0.01% wrong among the accepted"),
    ],
)
def test_bad_requests_get_one_sentence(
    source: Source, command: Command, words: tuple[str, ...], sentence: str
) -> None:
    shutil.copytree(source.run.path, "runs/mine")
    code, _, err = command("calibrate", "mine", *words)
    assert code == 2
    assert sentence in " ".join(err.split())
    assert "Traceback" not in err


def test_a_split_that_is_not_there_is_refused_by_name(source: Source, command: Command) -> None:
    shutil.copytree(source.run.path, "runs/mine")
    code, _, err = command("score", "mine", "--split", "vall")
    assert code == 2
    assert "no split is called 'vall'; did you mean val" in " ".join(err.split())
    code, _, err = command("score", "mine", "--split", "val")
    assert code == 2
    assert "demur attack mine pgd-20 --split val" in " ".join(err.split())
