"""How a command ends that cannot be carried out: one sentence, and never a traceback."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from typer import Typer

import demur
from demur.cli.messages import stop_message, replace_unencodable
from tests.conftest import Command
from tests.test_cli import refused

NO_MEMORY = [
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9e9"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough "
                 "memory: you tried to allocate 129600000000 bytes."),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]  # fmt: skip


GOES_ON = [
    "train digits-pgdat-rr epochs=50 --out run", "attack tiny pgd-20", "table methods-digits",
    "adaptive tiny", "distortion tiny", "demo", "bench --check -o page",
    "bench rejection tiny --out=page",
]  # fmt: skip
BEGINS_ANEW = [
    "bench", "bench digits-pgdat -o page", "bench attacks tiny -o page", "bench --check",
    "bench rejection tiny --only Con", "score tiny", "report tiny", "data get cifar10", "",
]  # fmt: skip


@pytest.mark.parametrize("words", GOES_ON + BEGINS_ANEW)
def test_a_stop_promises_what_is_true(
    words: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Typer, "__call__", lambda self, **_: sys.exit(130))
    code, out, err = command(*words.split())
    assert (code, out) == (130, "")
    if words in GOES_ON:
        guarantee = f"the same command goes on from what was finished: demur {words}"
    else:
        guarantee = "nothing is kept, and the same command begins anew"
    assert err == f"demur: stopped; {guarantee}\n"


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: str(error)[:30])
def test_running_out_of_memory_is_said(
    error: Exception, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*words: object) -> None:
        raise error

    monkeypatch.setattr("demur.training.Training", too_large)
    refused(command("train", "digits-pgdat"), "not enough memory for this", "smaller")


def test_faults_of_our_own_are_not_hidden(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*words: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("demur.training.Training", wrong)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        command("train", "digits-pgdat")


def test_a_stop_that_an_import_hides_is_told_when_it_fails(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(self: Typer, **_: object) -> None:
        with suppress(SystemExit):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError("half of a module is there")

    monkeypatch.setattr(Typer, "__call__", hidden)
    code, _, err = command("train", "digits-pgdat")
    assert code == 130
    assert err.endswith("from what was finished: demur train digits-pgdat\n")


@pytest.mark.parametrize("hides", [False, True])
def test_ctrl_c_while_modules_are_imported_is_a_sentence(hides: bool, tmp_path: Path) -> None:
    lines = ["import signal", "try:", "    signal.raise_signal(signal.SIGINT)"]
    lines += ["except SystemExit:", "    raise" + (" ImportError" if hides else "")]
    (tmp_path / "typer.py").write_text("\n".join(lines), encoding="utf-8")
    places = os.pathsep.join([str(tmp_path), str(Path(demur.__file__).parents[1])])
    words = [sys.executable, "-m", "demur", "list", "nets"]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr == "demur: stopped before anything was done\n"


def test_letters_that_a_terminal_does_not_know_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    replace_unencodable()
    terminal.write("1.0 ± 0.2")
    terminal.seek(0)
    assert terminal.read() == "1.0 ? 0.2"


def test_under_torchrun_the_whole_command_is_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "digits-pgdat"]
    assert stop_message(words).endswith("finished: demur train digits-pgdat")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert stop_message(words).endswith("the same torchrun command goes on from what was finished")


def test_what_only_reads_has_nothing_to_go_on_with() -> None:
    assert "goes on from what was finished" in stop_message(["table", "study-digits"])
    for words in (["table", "study-digits", "--kept", "results"], ["bench"], ["score", "x"]):
        assert "begins anew" in stop_message(words)
