"""Several processes at one run: different records at once, the same record once."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from demur.attacks import PGD
from demur.balls import Linf
from demur.evaluate import AttackOptions, Evaluator, run_attack
from demur.runs import Record, Run

ATTACK, OTHER = PGD(Linf(0.1), steps=3), PGD(Linf(0.1), steps=2)
ORDER = AttackOptions(n=20)
HOLD = """
import sys
from pathlib import Path
from demur.runs.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(tiny_run: Run, tmp_path: Path) -> Run:
    """A private copy of the shared run, whose clean records are made."""
    copied = Run(Path(shutil.copytree(tiny_run.path, tmp_path / "run")))
    open_evaluator(copied).clean("cal")
    return copied


def open_evaluator(run: Run, said: list[str] | None = None) -> Evaluator:
    return Evaluator(run, torch.device("cpu"), say=(said if said is not None else []).append)


def making(run: Run, record: Record) -> Path:
    return run.records_folder / f".making-{record.digest[:12]}"


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that makes a record until it is told to end."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    try:
        yield other
    finally:
        other.kill()
        other.wait()


def attacked_in_a_thread(run: Run, said: list[str]) -> tuple[threading.Thread, list[Record]]:
    found: list[Record] = []
    thread = threading.Thread(
        target=lambda: found.append(run_attack(open_evaluator(run, said), "a", ATTACK, ORDER))
    )
    thread.start()
    return thread, found


def test_another_record_can_be_made_meanwhile(run: Run) -> None:
    record = run_attack(open_evaluator(run), "a", ATTACK, ORDER)
    shutil.rmtree(run.records_folder)
    said: list[str] = []
    with held(making(run, record)):
        assert run_attack(open_evaluator(run, said), "b", OTHER, ORDER).label == "b"
    assert said == []


@pytest.mark.parametrize("tidied", [True, False])  # or killed before it could
def test_the_same_record_is_waited_for_and_read(
    tidied: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_attack(open_evaluator(run), "a", ATTACK, ORDER)
    away = run.path.with_name("away")
    run.records_folder.rename(away)
    monkeypatch.setattr(PGD, "perturb", None)  # it is not made a second time
    said: list[str] = []
    with held(making(run, record)) as other:
        thread, found = attacked_in_a_thread(run, said)
        thread.join(timeout=1.0)
        assert thread.is_alive()
        shutil.copytree(away, run.records_folder, dirs_exist_ok=True)
        if tidied:
            shutil.rmtree(making(run, record))  # as whoever has finished does
        other.communicate("done\n")
        thread.join(timeout=30)
    assert said == ["another process is making this record; waiting for it"]
    assert torch.equal(found[0].output.logits, record.output.logits)
    assert not making(run, record).exists()


def test_what_a_killed_process_was_making_is_made(run: Run) -> None:
    record = run_attack(open_evaluator(run), "a", ATTACK, ORDER)
    shutil.rmtree(run.records_folder)
    with held(making(run, record)) as other:
        thread, found = attacked_in_a_thread(run, [])
        other.kill()
        thread.join(timeout=60)
    assert torch.equal(found[0].output.logits, record.output.logits)
    assert not list(run.records_folder.glob(".*"))
