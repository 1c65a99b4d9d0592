"""Checkpoint selection, the paper's split without held-out images, and archives."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from demur.attacks import Clean
from demur.data import CIFAR10
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, archive, run_attack
from demur.methods import PGDAT, RR, Standard
from demur.nets import ResNet18
from demur.recipes import RECIPES, OneCycle, Piecewise, Recipe, recipe
from demur.report.terminal import train_command
from demur.runs import Run
from demur.training import train
from tests.cifar_files import use_small_set
from tests.conftest import TINIEST, Command
from tests.test_cli import expect_error

BRIEF = ["net=ResNet8(2)", "epochs=3", "batch_size=50", "precision=fp32", "attack.steps=1",
         "validation_attack.steps=1", "schedule.peak=0.05"]  # fmt: skip


class PaperRun(NamedTuple):
    """Folder of a small CIFAR-10 and a run trained on all of it."""

    data: Path
    run: Run


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> "PaperRun":
    """A run trained without held-out images, on random pixels."""
    folder = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        use_small_set(CIFAR10, patch, folder / "data")
        run = train(cifar("split=paper", "epochs=2"), folder / "run", data_folder=folder / "data")
        loaded = LoadedRun(run, torch.device("cpu"), folder / "data")
        run_attack(loaded, "clean", Clean(), RecordOptions(keep_images=0))
    return PaperRun(folder / "data", run)


@pytest.fixture
def small_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    use_small_set(CIFAR10, monkeypatch, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def command_there(command: Command, small_set: Path) -> Command:
    """Call the command as the shell would, where the small set is."""
    return lambda *words: command(*words, "--data", str(small_set))


def cifar(*changes: str) -> Recipe:
    return recipe("cifar10-pgdat-rr", [*BRIEF, *changes])


def lines_of(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ which epoch


def test_the_last_epoch_is_selected_without_a_selection_split(
    paper: PaperRun, small_set: Path, tmp_path: Path
) -> None:
    brief = cifar("selection=last", "epochs=2")
    for run in (train(brief, tmp_path / "run", data_folder=small_set), paper.run):
        check_that_the_last_epoch_is_selected(run)


def check_that_the_last_epoch_is_selected(run: Run) -> None:
    last = run.recipe.epochs
    assert (run.checkpoint["epoch"], run.checkpoint["value"]) == (last, None)
    assert run.checkpoint["selection_split"] is None
    assert run.checkpoint["reason"] == "the last epoch"
    assert run.checkpoint["selection_data"] is None
    assert not any(key.endswith(("robust", "clean")) for line in lines_of(run) for key in line)


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_best_epoch_is_selected_on_the_named_split(
    split: str, small_set: Path, tmp_path: Path
) -> None:
    made = cifar(f"selection={split}")
    run = train(made, tmp_path / "run", data_folder=small_set)
    values = [line[f"{split}_robust"] for line in lines_of(run)]
    assert run.checkpoint["value"] == max(values)
    assert run.checkpoint["epoch"] == values.index(max(values)) + 1
    assert run.checkpoint["selection_split"] == split
    assert run.checkpoint["reason"].startswith(f"largest {split} accuracy under PGD(")
    images = made.data.load(small_set)[split]  # type: ignore[index]
    assert run.checkpoint["selection_data"] == images.digest()


def test_a_page_says_that_the_last_epoch_is_selected(
    tmp_path: Path, command: Command, few_digits: None
) -> None:
    run = train(
        recipe("digits-pgdat-rr", [*TINIEST, "epochs=2", "selection=last"]), tmp_path / "run"
    )
    assert command("attack", str(run.path), "clean", "--n", "40")[0] == 0
    code, _, err = command("report", str(run.path), "-o", "page.html")
    assert code == 0, err
    page = Path("page.html").read_text(encoding="utf-8")
    shown = re.search(r"<dt>selected epoch</dt><dd>(.*?)</dd>", page)
    assert shown is not None
    assert shown[1] == "2 of 2: the last epoch"
    recipe_as_text = re.compile(r"<pre.*?</pre>|<code.*?</code>", re.S)
    assert "None" not in recipe_as_text.sub("", page)


def test_val_is_the_selection_split_if_it_exists() -> None:
    made = cifar()
    assert made.selection_split == "val"
    assert replace(made, data=CIFAR10(split="paper")).selection_split is None
    assert replace(made, selection="last").selection_split is None


def test_a_missing_selection_split_raises(small_set: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no val images; use selection=last"):
        train(cifar("split=paper", "selection=val"), tmp_path / "run", data_folder=small_set)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ nothing held out


def test_the_paper_split_trains_on_all_images(paper: PaperRun, small_set: Path) -> None:
    splits = paper.run.recipe.data.load(small_set)
    assert {name: len(images) for name, images in splits.items()} == {"fit": 100, "test": 20}
    assert paper.run.checkpoint["fit_data"] == splits["fit"].digest()


def test_without_cal_images_only_the_paper_protocol_is_scored(
    paper: PaperRun, command_there: Command
) -> None:
    shutil.copytree(paper.run.path, "runs/paper")
    code, out, err = command_there("score", "paper", "--json")
    assert code == 0, err
    assert {row["protocol"] for row in json.loads(out)["rows"]} == {"paper"}
    assert "no cal images were held out for this run" in " ".join(err.split())
    code, _, err = command_there("score", "paper", "--protocol", "deploy")
    assert code == 2
    assert "so no threshold can be deployed; train with split=held-out" in " ".join(err.split())
    code, _, err = command_there("report", "paper", "-o", "page.html")
    assert code == 0, err
    page = Path("page.html").read_text(encoding="utf-8")
    assert "since no cal images were held out" in page
    assert "deploy: thresholds frozen" not in page


def test_attacks_that_need_a_missing_split_raise(paper: PaperRun, command_there: Command) -> None:
    shutil.copytree(paper.run.path, "runs/paper")
    for words in (("adaptive",), ("clean", "--split", "cal")):
        code, _, err = command_there("attack", "paper", *words)
        assert code == 2
        assert "has no cal images; train with split=held-out" in " ".join(err.split())


# ------------------------------------------------------------------ runs without weights


def test_a_run_without_weights_can_be_scored_but_not_attacked(
    paper: PaperRun, tiny_run: Run, command_there: Command
) -> None:
    folder = Path(shutil.copytree(tiny_run.path, "runs/archive"))
    loaded = LoadedRun(Run(folder), torch.device("cpu"))
    run_attack(loaded, "clean", Clean(), RecordOptions(n=40))
    whole = RejectorEvaluation.of(loaded)
    (folder / "model.safetensors").unlink()
    again = RejectorEvaluation.of(LoadedRun(Run(folder), torch.device("cpu")))
    assert again.thresholds == whole.thresholds
    code, out, err = command_there("score", "archive", "--protocol", "deploy", "--json")
    assert code == 0, err
    assert {row["protocol"] for row in json.loads(out)["rows"]} == {"deploy"}
    code, _, err = command_there("attack", "archive", "pgd-20")
    assert code == 2
    assert "contains records without weights; train it again" in " ".join(err.split())


def test_no_training_starts_in_an_archive(
    scored_source: LoadedRun, command: Command, in_empty_folder: Path
) -> None:
    archived = archive(scored_source, Path("runs/archive"))
    before = {path: path.read_bytes() for path in archived.path.rglob("*") if path.is_file()}
    words = ("train", "@runs/archive/recipe.txt", "--out")
    expect_error(
        command(*words, "runs/archive"), "contains records of weights that are missing", "--out"
    )
    with pytest.raises(BadInput, match="orphan"):
        train(archived.recipe, archived.path)
    assert before == {
        path: path.read_bytes() for path in archived.path.rglob("*") if path.is_file()
    }
    assert len(archived.records()) == 2
    kept = Run(Path(shutil.copytree(archived.path, "results/kept")))
    assert train_command(kept) == "demur train @results/kept/recipe.txt --out runs/kept"


def test_show_describes_an_archive(
    scored_source: LoadedRun, command: Command, in_empty_folder: Path
) -> None:
    archived = archive(scored_source, Path("runs/archive"))
    code, out, _ = command("list", "archive")
    assert code == 0
    assert "# an archive: no weights, 3 records\n" in out  # two of test images, one of cal
    assert f"# checkpoint: {json.dumps(archived.checkpoint)}\n" in out
    assert "not trained" not in out
    (archived.path / "checkpoint.json").unlink()
    last = command("list", "archive")[1].splitlines()[-1]
    assert last.startswith("# not trained to the end; resume it with: demur train")


def test_missing_weights_are_reported_before_missing_data(
    paper: PaperRun, command: Command, in_empty_folder: Path
) -> None:
    folder = Path(shutil.copytree(paper.run.path, "runs/archive"))
    (folder / "model.safetensors").unlink()
    for words in (("attack", "archive", "pgd-20"), ("paper", "study", "distortion", "archive")):
        expect_error(
            command(*words, "--data", "nowhere"), "without weights; train it again elsewhere"
        )
    expect_error(
        command("calibrate", "archive", "--tpr", "0.9", "--data", "nowhere"), "has no cal images"
    )


# ------------------------------------------------------------------ recipes of the paper


@pytest.mark.parametrize("method", ["standard", "pgdat", "pgdat-rr"])
def test_every_recipe_of_the_paper_has_a_full_and_a_short_form(method: str) -> None:
    full, short = RECIPES[f"cifar10-{method}"], RECIPES[f"cifar10-{method}-short"]
    assert (full.epochs, short.epochs) == (110, 36)
    assert full.schedule == Piecewise(0.1)
    assert short.schedule == OneCycle(0.2, warmup=0.15)
    assert (full.ema, short.ema) == (0, 0.998)
    same = {name: getattr(full, name) for name in ("epochs", "schedule", "method", "ema")}
    assert replace(short, **same) == full
    assert short.method.head == full.method.head
    if isinstance(full.method.framework, PGDAT):
        assert full.method.framework == PGDAT(), "as in the reference code"
        assert short.method.framework == PGDAT(bn="batch")
    assert full.data.domain.classes == 10
    assert full.net == ResNet18()
    assert isinstance(full.method.framework, Standard) == (method == "standard")
    assert isinstance(full.method.head, RR) == (method == "pgdat-rr")
    assert (full.batch_size, full.weight_decay, full.momentum) == (128, 5e-4, 0.9)


def test_the_rate_drops_at_the_papers_epochs() -> None:
    """By ten for epochs 100 to 104, by a hundred from 105 on, counted from zero."""
    schedule, batches = RECIPES["cifar10-pgdat-rr"].schedule, 391
    total = 110 * batches

    def rate(epoch: int, step: int) -> float:
        return schedule((epoch * batches + step + 1) / total)

    assert rate(0, 0) == rate(99, batches - 2) == 0.1
    assert rate(100, 0) == rate(104, batches - 2) == pytest.approx(0.01)
    assert rate(105, 0) == rate(109, batches - 1) == pytest.approx(0.001)
    short = RECIPES["cifar10-pgdat-rr-short"].schedule
    assert max(short(k / 1000) for k in range(1001)) == pytest.approx(0.2)
    assert short(1.0) == 0
