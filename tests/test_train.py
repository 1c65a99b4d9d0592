"""Training: resumable to the bit, one writer, NaN and damage stop it without loss."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demur.data import SPLITS, Digits, Splits
from demur.errors import BadInput, Diverged
from demur.methods import Piecewise
from demur.recipes import RECIPES, Recipe, recipe
from demur.runs import Run
from demur.runs.files import exclusive_lock
from demur.spec import digest
from demur.training import Progress, Training, check_trainable, train
from tests.conftest import TINY
from tests.test_runs import spoil

BRIEF = ["epochs=4", "width=4", "attack.steps=2", "validation_attack.steps=1"]


@pytest.fixture(scope="module")
def brief() -> Recipe:
    return recipe("digits-pgdat-rr", BRIEF)


@pytest.fixture(scope="module")
def whole(brief: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The brief recipe trained without interruption."""
    return train(brief, tmp_path_factory.mktemp("whole") / "run")


def weights(run: Run) -> bytes:
    return (run.path / "model.safetensors").read_bytes()


class Stopped(Exception):
    """A crash."""


def crash_at(epoch: int, step: int) -> object:
    def watch(seen: Progress) -> None:
        if (seen.epoch, seen.step) == (epoch, step):
            raise Stopped

    return watch


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (1, 0), (1, 5), (2, 9)])
def test_interrupted_training_ends_with_the_same_bits(
    brief: Recipe, whole: Run, tmp_path: Path, epoch: int, step: int
) -> None:
    with pytest.raises(Stopped):
        train(brief, tmp_path / "run", watch=crash_at(epoch, step))  # type: ignore[arg-type]
    run = train(brief, tmp_path / "run")
    assert weights(run) == weights(whole)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert not (run.path / "state").exists()


def test_kill_9_then_the_same_command(whole: Run, tmp_path: Path) -> None:
    """A real process, killed early, killed in the middle of its second epoch, then left alone."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "demur", "train", "digits-pgdat-rr", *BRIEF, "--out", str(out)]
    threads = str(torch.get_num_threads())
    env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    for sign in ("recipe.txt", "state/now.json"):
        process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (out / sign).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert json.loads((out / "state" / "now.json").read_text())["epoch"] < 4
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert weights(Run(out)) == weights(whole)
    assert [p.name for p in out.rglob(".*.tmp")] == []


def test_two_processes_cannot_write_one_run(brief: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Run.claim(out, brief):
        pass
    command = [sys.executable, "-m", "demur", "train", "digits-pgdat-rr", *BRIEF, "--out", str(out)]
    with exclusive_lock(out):
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert "another process is writing" in second.stderr
    assert "Traceback" not in second.stderr
    assert sorted(p.name for p in out.iterdir()) == [".lock", "recipe.txt"]


def test_a_finished_run_is_not_trained_again(brief: Recipe, whole: Run) -> None:
    before = weights(whole)
    stamp = (whole.path / "model.safetensors").stat().st_mtime_ns
    train(brief, whole.path)
    assert weights(whole) == before
    assert (whole.path / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_chosen_epoch_is_the_first_best_on_val(whole: Run) -> None:
    lines = [json.loads(s) for s in (whole.path / "metrics.jsonl").read_text().splitlines()]
    best = max(line["val_robust"] for line in lines)
    assert whole.checkpoint["value"] == best
    assert whole.checkpoint["epoch"] == next(i["epoch"] for i in lines if i["val_robust"] == best)
    assert "val" in whole.checkpoint["reason"]


def test_seeds_differ_and_the_global_generator_is_untouched(
    brief: Recipe, whole: Run, tmp_path: Path
) -> None:
    before = torch.get_rng_state()
    other = train(replace(brief, seed=1), tmp_path / "run")
    assert torch.equal(before, torch.get_rng_state())
    assert weights(other) != weights(whole)


def test_nan_stops_and_names_the_step_and_keeps_the_last_good_state(
    brief: Recipe, tmp_path: Path
) -> None:
    bomb = replace(brief, epochs=3, schedule=Piecewise(0.01, milestones=(0.5,), gamma=1e30))
    with pytest.raises(BadInput) as error:
        train(bomb, tmp_path / "run")
    assert "epoch 2, step " in str(error.value)
    assert "of 9" in str(error.value)
    assert "state after epoch 1 is kept" in str(error.value)
    now = json.loads((tmp_path / "run" / "state" / "now.json").read_text())
    assert now["epoch"] == 1
    assert (tmp_path / "run" / "state" / now["file"]).exists()
    assert not Run(tmp_path / "run").finished


def test_a_damaged_checkpoint_is_named_and_not_overwritten(brief: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        train(brief, out, watch=crash_at(1, 2))  # type: ignore[arg-type]
    state = out / "state" / "epoch-0001.safetensors"
    spoil(state)
    spoiled = state.read_bytes()
    with pytest.raises(BadInput, match=r"epoch-0001\.safetensors is damaged: expected digest"):
        train(brief, out)
    assert state.read_bytes() == spoiled


def test_a_full_disk_ends_in_one_sentence_and_loses_nothing(
    brief: Recipe, whole: Run, tmp_path: Path
) -> None:
    """A real process whose files may not grow past a limit, as on a full disk."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "demur", "train", "digits-pgdat-rr", *BRIEF, "--out", str(out)]
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        limited, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in out.rglob(".*.tmp")] == []
    assert weights(train(brief, out)) == weights(whole)


def test_what_would_fail_after_an_hour_is_refused_at_once(brief: Recipe, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"batch of one image out of 1150.*batch_size=1150"):
        train(replace(brief, batch_size=1149), tmp_path / "run")
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


def test_a_training_that_learns_nothing_leaves_no_folder(
    brief: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Training, "__init__", fails)
    (tmp_path / "empty").mkdir()
    for folder, there in (("new", False), ("empty", True)):
        with pytest.raises(MemoryError):
            train(brief, tmp_path / folder)
        assert (tmp_path / folder).exists() is there, "what was there before stays"


@pytest.mark.parametrize(
    "changes",
    [
        ["attack.restarts=5"],
        ["attack.ball=L2(0.5)", "attack.restarts=3"],
        ["bn=eval", "attack.keep=success"],
    ],
)
def test_any_attack_can_craft(changes: list[str], tmp_path: Path) -> None:
    spec = recipe(
        "digits-pgdat-rr",
        ["epochs=1", "width=4", "attack.steps=1", "validation_attack=Clean", *changes],
    )
    assert train(spec, tmp_path / "run").finished


def test_survivors_and_train_mode_batch_norm_are_refused() -> None:
    with pytest.raises(BadInput, match="use bn=eval or keep=max_objective"):
        recipe("digits-pgdat-rr", ["attack.keep=success"])


def test_the_weights_tell_where_they_come_from(whole: Run, brief: Recipe) -> None:
    metadata = whole.checkpoint
    assert metadata["recipe_digest"] == digest(brief)
    assert metadata["fit_data"] == brief.data.load()["fit"].digest()
    words = "code torch numpy device threads seed reason selection_split selection_data engine precision"
    for key in words.split():
        assert key in metadata


def test_tiny_run_learns(tiny_run: Run) -> None:
    """The net that the other tests share is no random one."""
    lines = [json.loads(s) for s in (tiny_run.path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == int(TINY[0].removeprefix("epochs="))
    assert lines[-1]["val_clean"] > 0.8
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_copying_a_run_moves_it(tiny_run: Run, tmp_path: Path) -> None:
    copy = Run(Path(shutil.copytree(tiny_run.path, tmp_path / "mask_label")))
    assert copy.recipe == tiny_run.recipe
    assert copy.checkpoint == tiny_run.checkpoint


DIGITS = [n for n in RECIPES if n.startswith("digits-") and not n.endswith("swapped")]


def test_a_loss_that_runs_away_is_called_so(tmp_path: Path) -> None:
    made = recipe("digits-pgdat-ebd-swapped", ["width=4", "attack.steps=1", "head.m_out=-2000"])
    with pytest.raises(Diverged, match=r"the loss has grown to \d\.\de\+\d+ at epoch"):
        train(made, tmp_path / "run")


@pytest.mark.parametrize("name", DIGITS)
def test_every_way_to_train_resumes_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Digits.load

    def few(self: Digits, folder: Path | None = None) -> Splits:
        return {split: images.first(64) for split, images in load(self, folder).items()}

    monkeypatch.setattr(Digits, "load", few)
    attacked = [] if "standard" in name else ["framework.attack.steps=2"]
    made = recipe(name, ["epochs=2", "width=4", "batch_size=32", "selection=last", *attacked])
    unbroken = train(made, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(made, tmp_path / "run", watch=crash_at(1, 1))  # type: ignore[arg-type]
    assert weights(train(made, tmp_path / "run")) == weights(unbroken)
