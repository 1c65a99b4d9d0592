"""Several processes on one run: different records in parallel, the same record once."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from demur.attacks import PGD
from demur.attacks.balls import Linf
from demur.evaluate import LoadedRun, RecordOptions, run_attack
from demur.runs import Record, Run
from tests import forked

ATTACK, OTHER = PGD(Linf(0.1), steps=3), PGD(Linf(0.1), steps=2)
OPTIONS = RecordOptions(n=20)
HOLD_LOCK = """
import sys
from pathlib import Path
from demur.files.checked_files import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(tiny_run: Run, tmp_path: Path) -> Run:
    """A copy of the shared run with its clean records."""
    copied = Run(Path(shutil.copytree(tiny_run.path, tmp_path / "run")))
    load_run(copied).clean("cal")
    return copied


def load_run(run: Run, messages: list[str] | None = None) -> LoadedRun:
    return LoadedRun(
        run, torch.device("cpu"), on_message=(messages if messages is not None else []).append
    )


def lock_folder(run: Run, record: Record) -> Path:
    return run.records_folder / f".making-{record.digest[:12]}"


@contextmanager
def other_process_holding(folder: Path) -> Iterator[forked.Process]:
    """Run another process that holds the lock of a record until it reads a line."""
    other = forked.popen(["-c", HOLD_LOCK, str(folder)])
    assert other.stdout.readline() == "locked\n"
    try:
        yield other
    finally:
        other.kill()
        other.wait()


def attack_in_a_thread(run: Run, messages: list[str]) -> tuple[threading.Thread, list[Record]]:
    found: list[Record] = []
    thread = threading.Thread(
        target=lambda: found.append(run_attack(load_run(run, messages), "a", ATTACK, OPTIONS))
    )
    thread.start()
    return thread, found


def test_another_record_does_not_wait(run: Run) -> None:
    record = run_attack(load_run(run), "a", ATTACK, OPTIONS)
    shutil.rmtree(run.records_folder)
    messages: list[str] = []
    with other_process_holding(lock_folder(run, record)):
        assert run_attack(load_run(run, messages), "b", OTHER, OPTIONS).label == "b"
    assert messages == []


@pytest.mark.parametrize("cleaned_up", [True, False])  # False: killed before its cleanup
def test_the_same_record_is_awaited_and_read(
    cleaned_up: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_attack(load_run(run), "a", ATTACK, OPTIONS)
    away = run.path.with_name("away")
    run.records_folder.rename(away)
    monkeypatch.setattr(PGD, "perturb", None)  # the attack must not run a second time
    messages: list[str] = []
    with other_process_holding(lock_folder(run, record)) as other:
        thread, found = attack_in_a_thread(run, messages)
        thread.join(timeout=1.0)
        assert thread.is_alive()
        shutil.copytree(away, run.records_folder, dirs_exist_ok=True)
        if cleaned_up:
            shutil.rmtree(lock_folder(run, record))  # as the other process does at its end
        other.communicate("done\n")
        thread.join(timeout=30)
    assert messages == ["another process is making this record; waiting for it"]
    assert torch.equal(found[0].output.logits, record.output.logits)
    assert not lock_folder(run, record).exists()


def test_the_record_of_a_killed_process_is_made(run: Run) -> None:
    record = run_attack(load_run(run), "a", ATTACK, OPTIONS)
    shutil.rmtree(run.records_folder)
    with other_process_holding(lock_folder(run, record)) as other:
        thread, found = attack_in_a_thread(run, [])
        other.kill()
        thread.join(timeout=60)
    assert torch.equal(found[0].output.logits, record.output.logits)
    assert not list(run.records_folder.glob(".*"))
