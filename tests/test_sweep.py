"""demur sweep: recipes over seeds in one table, resumed after a kill."""

import csv
import io
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from demur.cli.train import train_run
from demur.errors import Diverged
from demur.evaluate import LoadedRun, RejectorEvaluation, paired_shares
from demur.evaluate.paired_differences import mean_of, paired
from demur.recipes import recipe
from demur.report.scored_runs import sweep_entries
from demur.runs import Run
from demur.spec import lines
from tests import forked
from tests.conftest import TINIEST, Command
from tests.test_cli import expect_error
from tests.test_tables_written import compiles

SWEEP = ["sweep", "@one.txt", "@a|b.txt", "--n", "40", "--attack", "clean"]
FEW_IMAGES = forked.few_digits(100)


@pytest.fixture
def recipes(in_empty_folder: Path, quick_table: None) -> Path:
    """Files with a net with R-Con and one without, one of them with a bar in its name."""
    write("one.txt", "digits-pgdat-rr")
    write("a|b.txt", "digits-pgdat")
    return in_empty_folder


def write(file: str, name: str, *changes: str) -> None:
    Path(file).write_text(lines(recipe(name, [*TINIEST, *changes])))


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_entries_are_all_combinations() -> None:
    found = sweep_entries(["digits-pgdat-rr"], ["head.tau=0.5,1", "epochs=1,2"])
    assert list(found)[:2] == [
        "digits-pgdat-rr head.tau=0.5 epochs=1", "digits-pgdat-rr head.tau=0.5 epochs=2",
    ]  # fmt: skip
    assert len(found) == 4
    assert found["digits-pgdat-rr head.tau=1 epochs=2"][1].epochs == 2
    one = sweep_entries(["digits-pgdat"], ["attack.ball=Linf(0.1),L2(1)"])
    assert [name.split()[1] for name in one] == ["attack.ball=Linf(0.1)", "attack.ball=L2(1)"]


def test_wrong_requests_are_one_sentence(command: Command, recipes: Path) -> None:
    Path("copy.txt").write_text(Path("one.txt").read_text())
    write("seeded.txt", "digits-pgdat", "seed=5")
    for words, sentence in (
        (["@one.txt", "@copy.txt"], "@copy.txt is the same recipe as @one.txt; leave out one"),
        (["@one.txt", "@one.txt"], "is the same recipe as @one.txt"),
        (["@a|b.txt", "@seeded.txt"], "is the same recipe as @a|b.txt"),
        (["digits-pgdat", "--set", "epochs=1,1"], "epochs=1 is the same recipe as"),
        (["digits-pgdat", "--set", "epochs"], "--set epochs sets nothing; write KEY=VALUE,VALUE"),
        (["digits-pgdat", "--set", "epochs="], "--set epochs= sets nothing"),
        (["digits-pgdat", "--set", "seed=1,2"], "seeds as --seeds"),
        (["digits-pgdat", "--set", "epochz=1"], "no key 'epochz'"),
        (["digits-pgdat", "--set", "epochs=1,x"], "not 'x'"),
        (["digits-pgdatt"], "no recipe is called"),
        (["digits-pgdat", "--set", "head.weight=1,2"], "no key"),
        (["@gone.txt"], "there is no file gone.txt"),
        (["digits-pgdat", "--attack", "pdg-20"], "no attack is called 'pdg-20'"),
        (["digits-pgdat", "--seeds", "0"], "seeds"),
        (["digits-pgdat", "--format", "tex"], "no format is called 'tex'"),
    ):
        expect_error(command("sweep", *words), sentence)
    assert not Path("runs").exists()


def test_the_table_has_means_and_paired_differences(command: Command, recipes: Path) -> None:
    code, out, err = command(*SWEEP, "--seeds", "2", "--format", "csv")
    assert code == 0, err
    found = {(one["recipe"], one["rejector"]): one for one in table(out)}
    assert list(found) == [("@one.txt", ""), ("@one.txt", "Con"), ("@one.txt", "R-Con"),
                           ("@a|b.txt", ""), ("@a|b.txt", "Con")]  # fmt: skip
    nets: dict[str, list[Run]] = {"one": [], "a|b": []}
    for name in nets:
        made = map(Run, Path("runs").glob(f"{name}-*"))
        nets[name] = sorted(made, key=lambda run: run.recipe.seed)
    assert [run.recipe.seed for run in nets["one"]] == [0, 1]
    gaps, coverage = [], []
    for first, second in zip(nets["one"], nets["a|b"], strict=True):
        errors = []
        for run, rejector in ((first, "R-Con"), (second, "Con")):
            loaded = LoadedRun(run, "cpu")
            (record,) = [one for one in run.records("test") if len(one.y) == 40]
            accepted = RejectorEvaluation.of(loaded).accepted(rejector, record)
            errors.append(accepted & ~record.correct)
        coverage.append(accepted.mean())
        gaps.append(paired_shares(errors[1], errors[0]))
    gap, line = paired(gaps), found["@a|b.txt", "Con"]
    for key, value in (("vs first", gap.value), ("vs first low", gap.lo)):
        assert float(line[key]) == pytest.approx(100 * value, abs=0.051)
    mean = mean_of(coverage)
    assert line["coverage"] == f"{100 * mean.value:.1f}"
    assert line["coverage deviation"] == f"{100 * np.std(coverage, ddof=1):.1f}"
    assert found["@one.txt", "R-Con"]["vs first"] == ""
    runs = sorted(Path("runs").iterdir())
    assert all(f"{run.name}: " in err for run in runs), "messages name their net"
    code, again, err = command(*SWEEP, "--seeds", "2", "--format", "markdown")
    assert "is trained already" in err
    assert r"| @a\|b.txt | clean, n=40 | Con |" in again
    assert sorted(Path("runs").iterdir()) == runs


def test_one_seed_has_intervals_and_other_formats(
    command: Command, recipes: Path, tmp_path: Path
) -> None:
    code, out, _ = command(*SWEEP, "--format", "json")
    rows = json.loads(out)[0]["rows"]
    assert code == 0
    assert {"coverage low", "coverage high"} <= set(rows[0])
    assert "coverage deviation" not in rows[0]
    text = command(*SWEEP)[1]
    assert "Recipes, 1 seed\n" in text.replace(" \n", "\n").replace("  ", "")
    compiles(command(*SWEEP, "--format", "latex")[1], tmp_path)


def test_a_recipe_that_fails_does_not_stop_the_others(
    command: Command, recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = train_run

    def failing(made: object, folder: Path, *words: object) -> object:
        if folder.name.startswith("one"):
            raise Diverged("the loss is no longer a number at epoch 1")
        return train(made, folder, *words)  # type: ignore[arg-type]

    monkeypatch.setattr("demur.cli.report.train_run", failing)
    code, out, err = command(*SWEEP, "--format", "csv")
    assert code == 2
    assert {one["recipe"] for one in table(out)} == {"@a|b.txt"}
    assert {one.get("vs first", "") for one in table(out)} == {""}
    assert "demur: 1 of 2 nets have no results; one-" in err
    assert "the loss is no longer a number at epoch 1" in err
    monkeypatch.setattr("demur.cli.report.train_run", train)
    assert len({one["recipe"] for one in table(command(*SWEEP, "--format", "csv")[1])}) == 2


def test_a_changed_file_is_another_net(command: Command, recipes: Path) -> None:
    words = ["sweep", "@a|b.txt", "--n", "40", "--attack", "clean", "--format", "csv"]
    assert command(*words)[0] == 0
    (old,) = Path("runs").iterdir()
    write("a|b.txt", "digits-pgdat", "momentum=0.5")
    code, _, err = command(*words)
    assert code == 0
    assert "is trained already" not in err
    assert len(set(Path("runs").iterdir()) - {old}) == 1


def test_a_killed_sweep_resumes_to_the_same_table(recipes: Path) -> None:
    words = ["-c", FEW_IMAGES, *SWEEP, "--seeds", "2", "--format", "csv", "--device", "cpu"]
    killed, whole = recipes / "killed", recipes / "whole"
    for folder in (killed, whole):
        folder.mkdir()
        for name in ("one.txt", "a|b.txt"):
            (folder / name).write_text((recipes / name).read_text())
    process = forked.popen(words, killed, dict(os.environ))
    deadline = time.monotonic() + 60

    def attacked() -> set[Path]:
        return {path.parents[1] for path in killed.glob("runs/*/records/*.json")}

    while len(attacked()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    weights = [run / "model.safetensors" for run in attacked()]
    done = {path: path.stat().st_mtime_ns for path in weights}
    assert 0 < len(done) < 4
    resumed, unbroken = (forked.run(words, folder, dict(os.environ)) for folder in (killed, whole))
    assert (resumed.returncode, unbroken.returncode) == (0, 0), resumed.stderr
    assert resumed.stdout == unbroken.stdout
    assert len(table(resumed.stdout)) == 5
    assert all(path.stat().st_mtime_ns == before for path, before in done.items())
