"""A pack: a new rejector gets its rows without weights and without data."""

import re
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

from demur.errors import BadInput
from demur.evaluate import LoadedRun, RejectorEvaluation, pack, values
from demur.rejectors import GDA, Con
from demur.runs import Run
from tests.conftest import Command
from tests.test_archive import NoData
from tests.test_cli import expect_error

COUNT = 80


@pytest.fixture(scope="module")
def packed(scored_source: LoadedRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    copy = copytree(scored_source.run.path, tmp_path_factory.mktemp("source") / "run")
    return pack(LoadedRun(Run(Path(copy)), "cpu"), tmp_path_factory.mktemp("pack") / "pack", COUNT)


def test_a_pack_holds_the_first_images_with_features_in_half_precision(
    scored_source: LoadedRun, packed: Run
) -> None:
    for whole, part in zip(scored_source.run.records("test"), packed.records("test"), strict=True):
        assert (len(part.y), part.metadata["n"], part.metadata["first_of"]) == (
            COUNT, COUNT, whole.digest,
        )  # fmt: skip
        assert part.digest != whole.digest
        assert torch.equal(part.output.logits, whole.output.logits[:COUNT])
        assert torch.equal(part.output.feature, whole.output.feature[:COUNT].half().float())
        assert "x_adv" not in part.arrays
    assert not packed.has_weights
    assert sorted(len(packed.records(split)) for split in ("fit", "cal")) == [1, 1]


def test_a_fitted_rejector_gets_its_rows(packed: Run) -> None:
    loaded = NoData(packed, torch.device("cpu"))
    evaluation = RejectorEvaluation.of(loaded, rejectors={"Con": Con(), "GDA": GDA()})
    records = packed.records("test")
    assert records
    for record in records:
        rows = evaluation.score_record(record).rows
        assert {row.protocol for row in rows if row.rejector == "GDA"} == {"paper", "deploy"}
        (fit,) = packed.records("fit")
        wanted = GDA().fit(fit.output, fit.y)(record.output)
        assert np.allclose(values(evaluation.scores["GDA"], record), wanted)


def test_the_command(command: Command, scored_source: LoadedRun) -> None:
    copytree(scored_source.run.path, Path("runs/tiny"))
    code, _, err = command("export", "--archive", "tiny", "-o", "small", "--features", "30")
    assert code == 0, err
    code, out, err = command("score", "small", "--all")
    assert code == 0, err
    assert "GDA" in out
    expect_error(
        command("export", "--archive", "tiny", "-o", "small", "--features", "30"), "is in the way"
    )
    expect_error(
        command("export", "--archive", "tiny", "-o", "s", "--features", "0"), "at least 1 image"
    )
    both = ["export", "--archive", "tiny", "-o", "s", "--features", "9", "--only", "Con"]
    expect_error(command(*both), "leave out one")


def test_without_features_there_is_nothing_to_pack(packed: Run, tmp_path: Path) -> None:
    copy = Run(Path(copytree(packed.path, tmp_path / "copy")))
    for path in copy.records_folder.glob("*-test-*"):
        path.unlink()
    with pytest.raises(BadInput, match="no test record with features"):
        pack(LoadedRun(copy, "cpu"), tmp_path / "again")


def test_the_example_of_the_guide_runs(
    scored_source: LoadedRun, in_empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copytree(scored_source.run.path, Path("runs/digits-pgdat-rr"))
    page = Path(__file__).parents[1] / "docs" / "guides" / "record-pack.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    exec(compile(code, str(page), "exec"), {"__name__": "record_pack"})
    assert capsys.readouterr().out.count(" mine ") == 4, "two records in two protocols"
