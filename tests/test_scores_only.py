"""Bare records: the scores of some rejectors in place of the net's answers."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from demur.attacks import PGD, Clean
from demur.balls import Linf
from demur.calibrate import TPR
from demur.errors import BadInput
from demur.evaluate import ORACLE, AttackOptions, Evaluator, Scorer, archive, run_attack
from demur.evaluate.certificates import issue
from demur.runs import Record, Run
from demur.runs.record import record_path, write_record
from demur.sanity import checked
from demur.sanity.objective import STILL
from tests.conftest import Command
from tests.test_archive import NoData
from tests.test_cli import refused


@pytest.fixture(scope="module")
def bare_run(scored_source: Evaluator, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return archive(scored_source, tmp_path_factory.mktemp("bare") / "run", ["R-Con", "GDA"])


def test_bare_records_give_the_same_rows_for_the_scores_they_keep(
    scored_source: Evaluator, bare_run: Run
) -> None:
    names = ("Con", "R-Con", "GDA", "T-Con (oracle)")
    whole, left = Scorer.of(scored_source), Scorer.of(NoData(bare_run, torch.device("cpu")))
    assert list(left.scores) == ["Con", "R-Con", "GDA"]
    assert set(left.without) == set(whole.scores) - set(left.scores)
    for one, other in zip(scored_source.run.records(), bare_run.records(), strict=True):
        assert set(other.arrays) == {"y", "index", "size_linf", "size_l2", "correct", "scores"}
        before, after = whole.scored(one), left.scored(other)
        assert [row.plain() for row in before.rows if row.rejector in names] == [
            row.plain() for row in after.rows
        ]
        assert before.summary == after.summary


def test_a_goal_that_did_not_move_is_seen_on_bare_records_too(
    scored_source: Evaluator, tmp_path: Path
) -> None:
    copy = shutil.copytree(scored_source.run.path, tmp_path / "run")
    evaluator = Evaluator(Run(Path(copy)), torch.device("cpu"))
    run_attack(evaluator, "idle", PGD(Linf(1e-9), steps=1, start="clean"))
    bare = NoData(archive(evaluator, tmp_path / "bare", ["R-Con"]), torch.device("cpu"))

    def flagged(of: Evaluator) -> list[tuple[str, ...]]:
        found = checked(of.run.records(), Scorer.of(of))
        return [flag.attacks for each in found for flag in each.flags if each.kind == STILL]

    assert flagged(bare) == flagged(evaluator) == [("idle",)]


def test_what_needs_the_answers_says_that_they_are_gone(
    bare_run: Run, command: Command, in_empty_folder: Path
) -> None:
    code, out, err = command("score", str(bare_run.path), "--json")
    assert code == 0, err
    assert {row["rejector"] for row in json.loads(out)["rows"]} >= {"Con", "R-Con", "GDA"}
    assert "without Con+R-Con, A, Energy" in err
    assert "only the scores of some others were kept" in err
    refused(command("theory", str(bare_run.path)), "only scores were kept", "train the recipe")
    refused(
        command("calibrate", str(bare_run.path), "--tpr", "0.85", "--rejector", "Energy"),
        "the score Energy(tau=1.0) was not kept",
    )
    refused(command("archive", str(bare_run.path), "-o", "x", "--only", "Energy"), "has neither")
    assert list(in_empty_folder.iterdir()) == []


def test_the_coupled_pair_is_promised_from_its_two_scores(
    scored_source: Evaluator, bare_run: Run, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"made of two scores; name those: Con,R-Con"):
        archive(scored_source, tmp_path / "x", ["Con+R-Con"])
    guarantee = TPR(0.8)
    whole, left = (
        issue(Evaluator(Run(Path(shutil.copytree(run.path, tmp_path / name))), torch.device("cpu")),
              "Con+R-Con", guarantee)
        for name, run in (("whole", scored_source.run), ("bare", bare_run))
    )  # fmt: skip
    assert whole.thresholds == left.thresholds
    assert len(left.thresholds) == 2


def test_bare_and_full_records_of_one_run_are_scored_together(
    scored_source: Evaluator, bare_run: Run, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(scored_source.run.path, tmp_path / "run"))
    for path in (copy / "records").glob("pgd-3-*"):
        path.unlink()
    for path in (bare_run.path / "records").glob("pgd-3-*"):
        shutil.copy2(path, copy / "records")
    evaluator = Evaluator(Run(copy), torch.device("cpu"))
    scoring = Scorer.of(evaluator)
    clean, attacked_one = (scoring.scored(record) for record in evaluator.run.records())
    assert not clean.record.scores_only
    assert attacked_one.record.scores_only
    assert {row.rejector for row in attacked_one.rows} == {"Con", "R-Con", "GDA", ORACLE}
    assert set(attacked_one.unseen) == set(scoring.scores) - {"Con", "R-Con", "GDA"}


def test_a_bare_copy_of_a_bare_copy_is_the_same(bare_run: Run, tmp_path: Path) -> None:
    again = archive(NoData(bare_run, torch.device("cpu")), tmp_path / "again", ["R-Con", "GDA"])
    for one, other in zip(bare_run.records(), again.records(), strict=True):
        assert list(one.kept) == list(other.kept)
        assert torch.equal(one.arrays["scores"], other.arrays["scores"])


def test_a_score_that_the_run_has_not_is_refused(scored_source: Evaluator, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no rejector called 'RCon'; did you mean R-Con"):
        archive(scored_source, tmp_path / "x", ["RCon"])
    assert not (tmp_path / "x").exists()


def test_a_score_that_one_record_cannot_give_is_refused(
    own_source: Evaluator, tmp_path: Path
) -> None:
    pgd = PGD(Linf(0.15), steps=3)
    run_attack(own_source, "pgd-3", pgd, AttackOptions(n=40, keep_features=False))
    archive(own_source, tmp_path / "plain", ["R-Con"])
    with pytest.raises(BadInput) as error:
        archive(own_source, tmp_path / "copy", ["R-Con", "GDA"])
    (lacking,) = own_source.run.records_folder.glob("pgd-3-test-*.npz")
    assert str(error.value).startswith(f"{lacking} has neither the features that GDA(")
    assert "make it again with demur attack" in str(error.value)
    assert not (tmp_path / "copy").exists()
    for path in (lacking, lacking.with_suffix(".json")):
        path.unlink()
    run_attack(own_source, "pgd-3", pgd, AttackOptions(n=40))
    made = archive(own_source, tmp_path / "copy", ["R-Con", "GDA"])
    assert all(len(each.kept) == 4 for each in made.records())  # with Con and the true confidence


def test_what_scores_were_learned_from_is_told_where_there_are_any(
    scored_source: Evaluator, bare_run: Run, tmp_path: Path
) -> None:
    (record, *_) = bare_run.records()
    assert record.metadata["scores_fitted"] == [scored_source.clean("fit").digest]
    full = archive(scored_source, tmp_path / "full")
    again = archive(NoData(full, torch.device("cpu")), tmp_path / "plain", ["R-Con"])
    assert "scores_fitted" not in again.records()[0].metadata
    third = archive(NoData(full, torch.device("cpu")), tmp_path / "third", ["GDA"])
    assert third.records()[0].metadata["scores_fitted"] == record.metadata["scores_fitted"]


def test_the_same_clean_images_are_kept_once(tiny_run: Run, tmp_path: Path) -> None:
    evaluator = Evaluator(
        Run(Path(shutil.copytree(tiny_run.path, tmp_path / "run"))), torch.device("cpu")
    )
    for features in (False, True):
        run_attack(evaluator, "clean", Clean(), AttackOptions("cal", keep_features=features))
    evaluator.clean("cal")
    assert len(evaluator.run.records("cal")) == 3
    kept = archive(evaluator, tmp_path / "thin").records("cal")
    assert [record.label for record in kept] == ["clean"]
    assert kept[0].kept, "the one with features, since scores are learned from them"
    shutil.rmtree(tmp_path / "thin")
    thin = archive(evaluator, tmp_path / "thin")
    (without,) = (r for r in evaluator.run.records("cal") if not r.metadata["features"])
    about = without.metadata | {"archive": True}
    path = record_path(thin.path / "records", "clean", "cal", without.digest)
    write_record(path, Record(without.arrays, about))
    again = archive(NoData(thin, torch.device("cpu")), tmp_path / "again")
    assert again.records("cal")[0].kept, "the fuller one again, now without features"


def test_thresholds_are_not_shown_on_the_images_they_come_from(
    tiny_run: Run, command: Command, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    shutil.rmtree(copy / "records", ignore_errors=True)
    evaluator = Evaluator(Run(copy), torch.device("cpu"))
    run_attack(evaluator, "clean", Clean(), AttackOptions("cal"))
    refused(command("score", str(copy)), "no record of test images yet", "--split cal")
    refused(
        command("score", str(copy), "--split", "cal", "--protocol", "deploy"),
        "say nothing about them",
    )
    code, out, err = command("score", str(copy), "--split", "cal", "--json")
    assert code == 0
    assert "say nothing about them" in err
    assert {row["protocol"] for row in json.loads(out)["rows"]} == {"paper"}
