"""Training resumes bit-identically, has one writer, and stops at NaN or damage without loss."""

import doctest
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import demur
from demur.data import SPLITS, Digits, Splits
from demur.errors import BadInput, Diverged
from demur.files.checked_files import exclusive_lock
from demur.recipes import RECIPES, Piecewise, Recipe, recipe
from demur.runs import Run
from demur.spec import digest
from demur.training import Progress, Training, check_trainable, loop, train
from tests import forked
from tests.conftest import TINY
from tests.test_runs import spoil

BRIEF = ["epochs=3", "width=4", "batch_size=64", "attack.steps=1", "validation_attack.steps=1"]
IMAGES = 135  # of each split: two whole batches and a part of one
FEW_IMAGES = forked.few_digits(IMAGES)


@contextmanager
def loading_few() -> Iterator[None]:
    load = Digits.load

    def load_few(self: Digits, folder: Path | None = None) -> Splits:
        return {split: images.first(IMAGES) for split, images in load(self, folder).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Digits, "load", load_few)
        yield


@pytest.fixture(autouse=True)
def few_images() -> Iterator[None]:
    """Few images in the tests, but not in fixtures of the whole session."""
    with loading_few():
        yield


@pytest.fixture(scope="module")
def brief() -> Recipe:
    return recipe("digits-pgdat-rr", BRIEF)


@pytest.fixture(scope="module")
def uninterrupted(brief: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The brief recipe trained without interruption."""
    with loading_few():
        return train(brief, tmp_path_factory.mktemp("uninterrupted") / "run")


def weights(run: Run) -> bytes:
    return (run.path / "model.safetensors").read_bytes()


class Crash(Exception):
    """Raised in the middle of a training."""


def crash_at(epoch: int, step: int) -> object:
    def on_progress(progress: Progress) -> None:
        if (progress.epoch, progress.step) == (epoch, step):
            raise Crash

    return on_progress


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (1, 2), (1, 3)])
def test_an_interrupted_training_ends_with_bit_identical_weights(
    brief: Recipe, uninterrupted: Run, tmp_path: Path, epoch: int, step: int
) -> None:
    with pytest.raises(Crash):
        train(brief, tmp_path / "run", on_progress=crash_at(epoch, step))  # type: ignore[arg-type]
    run = train(brief, tmp_path / "run")
    assert weights(run) == weights(uninterrupted)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert not (run.path / "state").exists()


def test_the_same_command_resumes_after_kill_9(uninterrupted: Run, tmp_path: Path) -> None:
    """A process is killed early, killed in its second epoch, then left to finish."""
    out = tmp_path / "run"
    command = ["train", "digits-pgdat-rr", *BRIEF, "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for file in ("recipe.txt", "state/now.json"):
        process = forked.popen(["-c", forked.few_digits(IMAGES, 0.1), *command], env=env)
        deadline = time.monotonic() + 60
        while not (out / file).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert json.loads((out / "state" / "now.json").read_text())["epoch"] < 3
    done = forked.run(["-c", FEW_IMAGES, *command], env=env)
    assert done.returncode == 0, done.stderr
    assert weights(Run(out)) == weights(uninterrupted)
    assert [p.name for p in out.rglob(".*.tmp")] == []


def test_the_package_does_not_hide_the_public_function() -> None:
    code = "import demur.training, demur.training.loop; from demur import train; train.__call__"
    assert forked.run(["-c", code]).returncode == 0
    assert demur.train is train


def test_the_example_in_the_docstring_runs(in_empty_folder: Path) -> None:
    failed, attempted = doctest.testmod(loop)
    assert attempted and not failed


def test_two_processes_cannot_write_one_run(brief: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Run.claim(out, brief):
        pass
    with exclusive_lock(out):
        second = forked.run(["-m", "demur", "train", "digits-pgdat-rr", *BRIEF, "--out", str(out)])
    assert second.returncode == 2
    assert "another process is writing" in second.stderr
    assert "Traceback" not in second.stderr
    assert sorted(p.name for p in out.iterdir()) == [".lock", "recipe.txt"]


def test_a_finished_run_is_not_trained_again(brief: Recipe, uninterrupted: Run) -> None:
    before = weights(uninterrupted)
    stamp = (uninterrupted.path / "model.safetensors").stat().st_mtime_ns
    train(brief, uninterrupted.path)
    assert weights(uninterrupted) == before
    assert (uninterrupted.path / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_selected_epoch_is_the_first_best_on_val(uninterrupted: Run) -> None:
    lines = [json.loads(s) for s in (uninterrupted.path / "metrics.jsonl").read_text().splitlines()]
    best = max(line["val_robust"] for line in lines)
    assert uninterrupted.checkpoint["value"] == best
    assert uninterrupted.checkpoint["epoch"] == next(
        i["epoch"] for i in lines if i["val_robust"] == best
    )
    assert "val" in uninterrupted.checkpoint["reason"]


def test_seeds_give_different_weights_and_the_global_generator_does_not_change(
    brief: Recipe, uninterrupted: Run, tmp_path: Path
) -> None:
    before = torch.get_rng_state()
    other = train(replace(brief, seed=1), tmp_path / "run")
    assert torch.equal(before, torch.get_rng_state())
    assert weights(other) != weights(uninterrupted)


def test_nan_stops_the_training_names_the_step_and_keeps_the_last_finite_state(
    brief: Recipe, tmp_path: Path
) -> None:
    diverging = replace(brief, epochs=3, schedule=Piecewise(0.01, milestones=(0.5,), gamma=1e30))
    with pytest.raises(BadInput) as error:
        train(diverging, tmp_path / "run")
    assert "epoch 2, step " in str(error.value)
    assert "of 3" in str(error.value)
    assert "state after epoch 1 is kept" in str(error.value)
    now = json.loads((tmp_path / "run" / "state" / "now.json").read_text())
    assert now["epoch"] == 1
    assert (tmp_path / "run" / "state" / now["file"]).exists()
    assert not Run(tmp_path / "run").has_weights


def test_a_damaged_checkpoint_is_named_and_not_overwritten(brief: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Crash):
        train(brief, out, on_progress=crash_at(1, 2))  # type: ignore[arg-type]
    state = out / "state" / "epoch-0001.safetensors"
    spoil(state)
    damaged = state.read_bytes()
    with pytest.raises(BadInput, match=r"epoch-0001\.safetensors is damaged: expected digest"):
        train(brief, out)
    assert state.read_bytes() == damaged


LIMITED = """
import resource, sys
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
"""


def test_a_full_disk_gives_one_sentence_and_loses_nothing(
    brief: Recipe, uninterrupted: Run, tmp_path: Path
) -> None:
    """A process whose files may not grow past a limit, as on a full disk."""
    out = tmp_path / "run"
    code = LIMITED + FEW_IMAGES
    done = forked.run(["-c", code, "train", "digits-pgdat-rr", *BRIEF, "--out", str(out)])
    assert done.returncode == 2, done.stderr
    assert "a file reached the limit on its size" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in out.rglob(".*.tmp")] == []
    assert weights(train(brief, out)) == weights(uninterrupted)


def test_untrainable_recipes_and_splits_raise_before_training(
    brief: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"batch of one image out of 135.*batch_size=135"):
        train(replace(brief, batch_size=134), tmp_path / "run")
    with pytest.raises(BadInput, match="batch norm needs two"):
        train(replace(brief, batch_size=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    splits = brief.data.load()
    ones = splits["fit"].y == 1
    one_class: Splits = {
        name: replace(splits[name], pixels=splits["fit"].pixels[ones], y=splits["fit"].y[ones])
        for name in SPLITS
    }
    with pytest.raises(BadInput, match="one class only"):
        check_trainable(brief, one_class)


def test_a_training_that_fails_at_the_start_leaves_no_folder(
    brief: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Training, "__init__", fail)
    (tmp_path / "empty").mkdir()
    for folder, existed in (("new", False), ("empty", True)):
        with pytest.raises(MemoryError):
            train(brief, tmp_path / folder)
        assert (tmp_path / folder).exists() is existed, "an existing folder stays"


@pytest.mark.parametrize(
    "changes",
    [
        ["attack.restarts=5"],
        ["attack.ball=L2(0.5)", "attack.restarts=3"],
        ["bn=eval", "attack.keep=success"],
    ],
)
def test_any_attack_can_make_training_images(
    changes: list[str], few_digits: None, tmp_path: Path
) -> None:
    spec = recipe(
        "digits-pgdat-rr",
        ["epochs=1", "width=4", "attack.steps=1", "validation_attack=Clean", *changes],
    )
    assert train(spec, tmp_path / "run").has_weights


def test_keep_success_with_train_mode_batch_norm_raises() -> None:
    with pytest.raises(BadInput, match="use bn=eval or keep=max_objective"):
        recipe("digits-pgdat-rr", ["attack.keep=success"])


def test_the_checkpoint_holds_the_provenance_of_the_weights(
    uninterrupted: Run, brief: Recipe
) -> None:
    metadata = uninterrupted.checkpoint
    assert metadata["recipe_digest"] == digest(brief)
    assert metadata["fit_data"] == brief.data.load()["fit"].digest()
    assert metadata.keys() >= {
        "code", "torch", "numpy", "device", "threads", "seed", "reason", "selection_split",
        "selection_data", "engine", "precision",
    }  # fmt: skip


def test_the_shared_run_is_trained(tiny_run: Run) -> None:
    """The net that other tests share is better than random."""
    lines = [json.loads(s) for s in (tiny_run.path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == int(TINY[0].removeprefix("epochs="))
    assert lines[-1]["val_clean"] > 0.8
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_copied_run_folder_is_the_same_run(tiny_run: Run, tmp_path: Path) -> None:
    copy = Run(Path(shutil.copytree(tiny_run.path, tmp_path / "copy")))
    assert copy.recipe == tiny_run.recipe
    assert copy.checkpoint == tiny_run.checkpoint


DIGITS = [name for name in RECIPES if name.startswith("digits-")]


def test_a_diverging_loss_is_named(tmp_path: Path) -> None:
    changes = ["head.m_in=-5", "head.m_out=-2000", "head.weight=1", "width=4", "attack.steps=1"]
    spec = recipe("digits-pgdat-ebd", changes)
    with pytest.raises(Diverged, match=r"the loss has grown to \d\.\de\+\d+ at epoch"):
        train(spec, tmp_path / "run")


@pytest.mark.parametrize("name", DIGITS)
def test_every_digits_recipe_resumes_with_bit_identical_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Digits.load

    def load_few(self: Digits, folder: Path | None = None) -> Splits:
        return {split: images.first(48) for split, images in load(self, folder).items()}

    monkeypatch.setattr(Digits, "load", load_few)
    short_attack = [] if "standard" in name else ["framework.attack.steps=1"]
    brief = ["epochs=2", "width=4", "batch_size=24", "selection=last", "validation_attack=Clean"]
    spec = recipe(name, [*brief, *short_attack])

    def copy_folder(progress: Progress) -> None:
        if (progress.epoch, progress.step) == (1, 1):
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    expected = train(spec, tmp_path / "run", on_progress=copy_folder)
    assert not Run(tmp_path / "killed").has_weights
    assert weights(train(spec, tmp_path / "killed")) == weights(expected)
