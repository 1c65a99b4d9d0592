"""Slim copies of runs: the same tables without weights, data, features or even answers."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from demur.attacks import Clean
from demur.data import Digits, Splits
from demur.errors import BadInput
from demur.evaluate import Order, Scoring, Source, attacked, slim
from demur.rejectors import tried_on
from demur.runs import Run
from demur.sanity import checked
from tests.conftest import Command


def test_a_slim_copy_gives_the_same_tables_without_weights_or_data(
    scored_source: Source, tmp_path: Path
) -> None:
    target = tmp_path / "kept" / "slim"
    thin = slim(scored_source, target)
    assert not (target / "model.safetensors").exists()
    assert all("feature" not in r.arrays and "x_adv" not in r.arrays for r in thin.records())
    for wanted in (None, tried_on(Digits())):
        whole = Scoring.of(scored_source, rejectors=wanted)
        again = Scoring.of(NoData(thin, torch.device("cpu")), rejectors=wanted)
        assert again.thresholds == whole.thresholds
        for one, other in zip(scored_source.run.records(), thin.records(), strict=True):
            pairs = ((whole, one), (again, other))
            rows = [[row.plain() for row in s.scored(record).rows] for s, record in pairs]
            assert rows[0] == rows[1]


class NoData(Source):
    """A source on a machine that has no data set."""

    @property
    def splits(self) -> Splits:
        """None."""
        raise AssertionError("a slim run was asked for images")


def test_a_slim_copy_of_a_slim_copy_is_the_same(scored_source: Source, tmp_path: Path) -> None:
    once = slim(scored_source, tmp_path / "once")
    twice = slim(NoData(once, torch.device("cpu")), tmp_path / "twice")
    for one, other in zip(once.records(), twice.records(), strict=True):
        assert list(one.kept) == list(other.kept) != []
        assert all(torch.equal(one.kept[text], other.kept[text]) for text in one.kept)
        assert one.about["scores_fitted"] == other.about["scores_fitted"]


def test_a_slim_copy_never_writes_over_anything(scored_source: Source, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match="is in the way"):
        slim(scored_source, tmp_path / "there")
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["mine.txt"]
    assert not (tmp_path / ".there.half").exists()


# ------------------------------------------------------------------ bare records


@pytest.fixture(scope="module")
def bare_run(scored_source: Source, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return slim(scored_source, tmp_path_factory.mktemp("bare") / "run", ["R-Con", "GDA"])


def test_bare_records_give_the_same_rows_for_the_scores_they_keep(
    scored_source: Source, bare_run: Run
) -> None:
    names = ("Con", "R-Con", "GDA", "T-Con (oracle)")
    whole, left = Scoring.of(scored_source), Scoring.of(NoData(bare_run, torch.device("cpu")))
    assert list(left.scores) == ["Con", "R-Con", "GDA"]
    assert set(left.without) == set(whole.scores) - set(left.scores)
    for one, other in zip(scored_source.run.records(), bare_run.records(), strict=True):
        assert set(other.arrays) == {"y", "index", "size_linf", "size_l2", "correct", "scores"}
        before, after = whole.scored(one), left.scored(other)
        assert [row.plain() for row in before.rows if row.rejector in names] == [
            row.plain() for row in after.rows
        ]
        assert before.summary == after.summary


def test_bare_records_are_sane_as_before(scored_source: Source, bare_run: Run) -> None:
    def told(source: Source) -> dict[str, tuple[bool, str]]:
        found = checked(source.run.records(), Scoring.of(source))
        return {each.kind: (bool(each.flags), each.lacks) for each in found}

    here, there = told(scored_source), told(NoData(bare_run, torch.device("cpu")))
    kind = "the goal did not move"
    assert here[kind] == there[kind] == (False, "")


def test_what_needs_the_answers_says_that_they_are_gone(
    bare_run: Run, command: Command, in_empty_folder: Path
) -> None:
    code, out, err = command("score", str(bare_run.path), "--json")
    assert code == 0, err
    assert {row["rejector"] for row in json.loads(out)["rows"]} >= {"Con", "R-Con", "GDA"}
    assert "only the scores of some rejectors were kept" in err
    for words in (["theory"], ["report", "--out", "page.html"]):
        code, _, err = command(words[0], str(bare_run.path), *words[1:])
        assert code == 2, err
        assert "Traceback" not in err
    assert list(in_empty_folder.iterdir()) == []


def test_a_bare_copy_of_a_bare_copy_is_the_same(bare_run: Run, tmp_path: Path) -> None:
    again = slim(NoData(bare_run, torch.device("cpu")), tmp_path / "again", ["R-Con", "GDA"])
    for one, other in zip(bare_run.records(), again.records(), strict=True):
        assert list(one.kept) == list(other.kept)
        assert torch.equal(one.arrays["scores"], other.arrays["scores"])


def test_a_score_that_the_run_has_not_is_refused(scored_source: Source, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no rejector called 'RCon'; did you mean R-Con"):
        slim(scored_source, tmp_path / "x", ["RCon"])
    assert not (tmp_path / "x").exists()


def test_the_same_clean_images_are_kept_once(tiny_run: Run, tmp_path: Path) -> None:
    source = Source(
        Run(Path(shutil.copytree(tiny_run.path, tmp_path / "run"))), torch.device("cpu")
    )
    for features in (False, True):
        attacked(source, "clean", Clean(), Order("cal", keep_features=features))
    source.clean("cal")
    assert len(source.run.records("cal")) == 3
    kept = slim(source, tmp_path / "thin").records("cal")
    assert [record.label for record in kept] == ["clean"]
    assert kept[0].kept, "the one with features, since scores are learned from them"
