"""Commands that fail or are stopped print one sentence, never a traceback."""

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
from demur.cli.app import replace_unencodable, stop_message
from tests.conftest import Command
from tests.test_cli import expect_error

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


RESUMES = [
    "train digits-pgdat-rr epochs=50 --out run", "attack tiny pgd-20",
    "paper table 2 --scale smoke", "paper figure tau --scale smoke",
    "paper study recipes methods-digits", "paper study adaptive tiny",
    "paper study distortion tiny", "demo",
]  # fmt: skip
STARTS_OVER = [
    "verify tiny", "score tiny", "report tiny",
    "data get cifar10", "paper study theory tiny", "paper table 2 --from results", "",
]  # fmt: skip


@pytest.mark.parametrize("words", RESUMES + STARTS_OVER)
def test_the_stop_message_says_whether_the_command_resumes(
    words: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Typer, "__call__", lambda self, **_: sys.exit(130))
    code, out, err = command(*words.split())
    assert (code, out) == (130, "")
    if words in RESUMES:
        what = "from what was finished"
        if words.startswith("attack"):  # 40 seconds of one batch left nothing
            what = "after the last finished batch, if there is one (--batch-size sets its size)"
        message = f"the same command resumes {what}: demur {words}"
    else:
        message = "nothing is stored, and the same command starts from the beginning"
    assert err == f"demur: stopped; {message}\n"


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: str(error)[:30])
def test_out_of_memory_is_reported(
    error: Exception, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*words: object) -> None:
        raise error

    monkeypatch.setattr("demur.training.loop.Training", too_large)
    expect_error(command("train", "digits-pgdat"), "not enough memory for this", "smaller")


def test_bugs_are_not_hidden(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*words: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("demur.training.loop.Training", wrong)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        command("train", "digits-pgdat")


def test_a_stop_that_an_import_swallows_is_reported_when_it_fails(
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
def test_ctrl_c_during_imports_prints_one_sentence(hides: bool, tmp_path: Path) -> None:
    lines = ["import signal", "try:", "    signal.raise_signal(signal.SIGINT)"]
    lines += ["except SystemExit:", "    raise" + (" ImportError" if hides else "")]
    (tmp_path / "typer.py").write_text("\n".join(lines), encoding="utf-8")
    python_path = os.pathsep.join([str(tmp_path), str(Path(demur.__file__).parents[1])])
    words = [sys.executable, "-m", "demur", "list", "nets"]
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr == "demur: stopped before anything was done\n"


def test_characters_that_a_terminal_cannot_encode_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    replace_unencodable()
    terminal.write("1.0 ± 0.2")
    terminal.seek(0)
    assert terminal.read() == "1.0 ? 0.2"


def test_under_torchrun_the_torchrun_command_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "digits-pgdat"]
    assert stop_message(words).endswith("finished: demur train digits-pgdat")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert stop_message(words).endswith("the same torchrun command resumes from what was finished")


def test_commands_that_only_read_start_over() -> None:
    assert "resumes from what was finished" in stop_message(["paper", "table", "2"])
    for words in (["paper", "table", "2", "--from", "results"], ["verify"], ["score", "x"]):
        assert "starts from the beginning" in stop_message(words)
