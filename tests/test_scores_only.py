"""Scores-only records: the scores of some rejectors instead of the net's outputs."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from demur.attacks import PGD, Clean
from demur.attacks.balls import L2, Linf
from demur.calibrate import TPR
from demur.errors import BadInput
from demur.evaluate import ORACLE, LoadedRun, RecordOptions, RejectorEvaluation, archive, run_attack
from demur.evaluate.certificates import issue
from demur.runs import Record, Run
from demur.runs.record import record_path, write_record
from demur.sanity import run_checks
from demur.sanity.single_records import NOT_RISEN
from tests.conftest import Command
from tests.test_archive import NoData
from tests.test_cli import expect_error


@pytest.fixture(scope="module")
def scores_only_run(scored_source: LoadedRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return archive(scored_source, tmp_path_factory.mktemp("bare") / "run", ["R-Con", "GDA"])


def test_scores_only_records_give_the_same_rows_for_their_scores(
    scored_source: LoadedRun, scores_only_run: Run
) -> None:
    names = ("Con", "R-Con", "GDA", "T-Con (oracle)")
    whole, archived = (
        RejectorEvaluation.of(scored_source),
        RejectorEvaluation.of(NoData(scores_only_run, torch.device("cpu"))),
    )
    assert list(archived.scores) == ["Con", "R-Con", "GDA"]
    assert set(archived.unavailable) == set(whole.scores) - set(archived.scores)
    for one, other in zip(scored_source.run.records(), scores_only_run.records(), strict=True):
        assert set(other.arrays) == {"y", "index", "size_linf", "correct", "scores"}
        before, after = whole.score_record(one), archived.score_record(other)
        assert [row.to_json() for row in before.rows if row.rejector in names] == [
            row.to_json() for row in after.rows
        ]
        assert before.summary == after.summary


def test_scores_only_records_keep_the_l2_norm_of_attacks_in_l2(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    copy = shutil.copytree(scored_source.run.path, tmp_path / "run")
    loaded = LoadedRun(Run(Path(copy)), torch.device("cpu"))
    record = run_attack(loaded, "l2", PGD(L2(0.5), steps=1))
    kept = {one.label: one for one in archive(loaded, tmp_path / "bare", ["R-Con"]).records()}
    assert torch.equal(kept["l2"].arrays["size_l2"], record.arrays["size_l2"])
    assert "size_linf" not in kept["l2"].arrays
    largest = float(record.arrays["size_linf"].max())
    assert kept["l2"].metadata["largest_linf"] == pytest.approx(largest)
    others = [one for one in kept.values() if one.label != "l2"]
    assert others and not any("size_l2" in one.arrays for one in others)


def test_an_objective_that_did_not_rise_is_flagged_on_scores_only_records_too(
    scored_source: LoadedRun, tmp_path: Path
) -> None:
    copy = shutil.copytree(scored_source.run.path, tmp_path / "run")
    loaded = LoadedRun(Run(Path(copy)), torch.device("cpu"))
    run_attack(loaded, "idle", PGD(Linf(1e-9), steps=1, start="clean"))
    archived = NoData(archive(loaded, tmp_path / "bare", ["R-Con"]), torch.device("cpu"))

    def flagged(by: LoadedRun) -> list[tuple[str, ...]]:
        found = run_checks(by.run.records(), RejectorEvaluation.of(by))
        return [flag.attacks for each in found for flag in each.flags if each.kind == NOT_RISEN]

    assert flagged(archived) == flagged(loaded) == [("idle",)]


def test_commands_that_need_outputs_say_that_they_are_missing(
    scores_only_run: Run, command: Command, in_empty_folder: Path
) -> None:
    code, out, err = command("score", str(scores_only_run.path), "--json")
    assert code == 0, err
    assert {row["rejector"] for row in json.loads(out)["rows"]} >= {"Con", "R-Con", "GDA"}
    assert "without Con+R-Con, A, Energy" in err
    assert "only the scores of some others were kept" in err
    expect_error(
        command("paper", "study", "theory", str(scores_only_run.path)),
        "has only scores",
        "train the recipe",
    )
    expect_error(
        command("calibrate", str(scores_only_run.path), "--tpr", "0.85", "--rejector", "Energy"),
        "does not contain the score Energy(tau=1.0)",
    )
    expect_error(
        command("export", "--archive", str(scores_only_run.path), "-o", "x", "--only", "Energy"),
        "has neither",
    )
    assert list(in_empty_folder.iterdir()) == []


def test_the_coupled_rejector_is_certified_from_its_two_scores(
    scored_source: LoadedRun, scores_only_run: Run, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"made of two scores; name those: Con,R-Con"):
        archive(scored_source, tmp_path / "x", ["Con+R-Con"])
    guarantee = TPR(0.8)
    whole, left = (
        issue(LoadedRun(Run(Path(shutil.copytree(run.path, tmp_path / name))), torch.device("cpu")),
              "Con+R-Con", guarantee)
        for name, run in (("whole", scored_source.run), ("bare", scores_only_run))
    )  # fmt: skip
    assert whole.thresholds == left.thresholds
    assert len(left.thresholds) == 2


def test_scores_only_and_full_records_of_one_run_are_scored_together(
    scored_source: LoadedRun, scores_only_run: Run, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(scored_source.run.path, tmp_path / "run"))
    for path in (copy / "records").glob("pgd-3-*"):
        path.unlink()
    for path in (scores_only_run.path / "records").glob("pgd-3-*"):
        shutil.copy2(path, copy / "records")
    loaded = LoadedRun(Run(copy), torch.device("cpu"))
    evaluation = RejectorEvaluation.of(loaded)
    clean, attacked = (evaluation.score_record(record) for record in loaded.run.records())
    assert not clean.record.scores_only
    assert attacked.record.scores_only
    assert {row.rejector for row in attacked.rows} == {"Con", "R-Con", "GDA", ORACLE}
    assert set(attacked.missing_rejectors) == set(evaluation.scores) - {"Con", "R-Con", "GDA"}


def test_a_scores_only_archive_of_a_scores_only_archive_is_the_same(
    scores_only_run: Run, tmp_path: Path
) -> None:
    again = archive(
        NoData(scores_only_run, torch.device("cpu")), tmp_path / "again", ["R-Con", "GDA"]
    )
    for one, other in zip(scores_only_run.records(), again.records(), strict=True):
        assert list(one.stored_scores) == list(other.stored_scores)
        assert torch.equal(one.arrays["scores"], other.arrays["scores"])


def test_an_unknown_rejector_raises_one_sentence(scored_source: LoadedRun, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no rejector 'RKon'; did you mean"):
        archive(scored_source, tmp_path / "x", ["RKon"])
    assert not (tmp_path / "x").exists()


def test_a_score_that_one_record_cannot_give_raises_one_sentence(
    own_source: LoadedRun, tmp_path: Path
) -> None:
    pgd = PGD(Linf(0.15), steps=3)
    run_attack(own_source, "pgd-3", pgd, RecordOptions(n=40, keep_features=False))
    archive(own_source, tmp_path / "plain", ["R-Con"])
    with pytest.raises(BadInput) as error:
        archive(own_source, tmp_path / "copy", ["R-Con", "GDA"])
    (lacking,) = own_source.run.records_folder.glob("pgd-3-test-*.npz")
    assert str(error.value).startswith(f"{lacking} has neither the features that GDA(")
    assert "make it again with demur attack" in str(error.value)
    assert not (tmp_path / "copy").exists()
    for path in (lacking, lacking.with_suffix(".json")):
        path.unlink()
    run_attack(own_source, "pgd-3", pgd, RecordOptions(n=40))
    made = archive(own_source, tmp_path / "copy", ["R-Con", "GDA"])
    assert all(
        len(each.stored_scores) == 4 for each in made.records()
    )  # with Con and the true confidence


def test_metadata_names_the_record_that_scores_were_fitted_on(
    scored_source: LoadedRun, scores_only_run: Run, tmp_path: Path
) -> None:
    (record, *_) = scores_only_run.records()
    assert record.metadata["scores_fitted"] == [scored_source.clean("fit").digest]
    full = archive(scored_source, tmp_path / "full")
    again = archive(NoData(full, torch.device("cpu")), tmp_path / "plain", ["R-Con"])
    assert "scores_fitted" not in again.records()[0].metadata
    third = archive(NoData(full, torch.device("cpu")), tmp_path / "third", ["GDA"])
    assert third.records()[0].metadata["scores_fitted"] == record.metadata["scores_fitted"]


def test_equal_clean_records_are_archived_once(tiny_run: Run, tmp_path: Path) -> None:
    loaded = LoadedRun(
        Run(Path(shutil.copytree(tiny_run.path, tmp_path / "run"))), torch.device("cpu")
    )
    for features in (False, True):
        run_attack(loaded, "clean", Clean(), RecordOptions("cal", keep_features=features))
    loaded.clean("cal")
    assert len(loaded.run.records("cal")) == 3
    kept = archive(loaded, tmp_path / "archived").records("cal")
    assert [record.label for record in kept] == ["clean"]
    assert kept[0].stored_scores, "the one with features, since scores are computed from them"
    shutil.rmtree(tmp_path / "archived")
    archived = archive(loaded, tmp_path / "archived")
    (without,) = (r for r in loaded.run.records("cal") if not r.metadata["features"])
    metadata = without.metadata | {"archive": True}
    path = record_path(archived.path / "records", "clean", "cal", without.digest)
    write_record(path, Record(without.arrays, metadata))
    again = archive(NoData(archived, torch.device("cpu")), tmp_path / "again")
    assert again.records("cal")[0].stored_scores, "the fuller one again, now without features"


def test_thresholds_are_not_tested_on_the_images_they_were_chosen_on(
    tiny_run: Run, command: Command, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    shutil.rmtree(copy / "records", ignore_errors=True)
    loaded = LoadedRun(Run(copy), torch.device("cpu"))
    run_attack(loaded, "clean", Clean(), RecordOptions("cal"))
    expect_error(command("score", str(copy)), "no record of test images yet", "--split cal")
    expect_error(
        command("score", str(copy), "--split", "cal", "--protocol", "deploy"),
        "say nothing about them",
    )
    code, out, err = command("score", str(copy), "--split", "cal", "--json")
    assert code == 0
    assert "say nothing about them" in err
    assert {row["protocol"] for row in json.loads(out)["rows"]} == {"paper"}
