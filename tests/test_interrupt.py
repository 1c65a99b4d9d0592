"""Ctrl-C ends a command at any moment, with exit code 130 and one sentence."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")

TRAIN = [sys.executable, "-m", "demur", "train", "digits-pgdat-rr", "epochs=900", "--out"]
MOMENTS = 20
SECONDS = 3.0
BEFORE_DEMUR = "KeyboardInterrupt"  # printed by Python if demur's first line is not reached yet


def swallowing(body: str) -> subprocess.CompletedProcess[str]:
    script = f"import os, signal\nfrom demur.interrupt import ctrl_c\n{body}"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )


def test_a_module_that_catches_everything_while_it_is_imported_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "greedy.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n"
        "    pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = swallowing("with ctrl_c(lambda: 'stopped'):\n    import greedy\nprint('went on')")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "demur: stopped\n")


def test_code_that_catches_the_exit_is_ended_after_a_while() -> None:
    done = swallowing(
        "import demur.interrupt, time\ndemur.interrupt.UNWIND_SECONDS = 0.2\n"
        "with ctrl_c(lambda: 'stopped'):\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException:\n        time.sleep(30)\n"
    )
    assert (done.returncode, done.stderr) == (130, "demur: stopped\n")


def test_no_training_survives_ctrl_c_in_its_first_seconds(tmp_path: Path) -> None:
    """Twenty trainings, three at a time, each stopped at another moment."""
    waiting = [SECONDS * (i + 1) / MOMENTS for i in range(MOMENTS)]
    ended: list[tuple[float, int, str]] = []
    running: list[tuple[float, float, subprocess.Popen[str]]] = []  # moment, start, process
    while waiting or running:
        while waiting and len(running) < 3:
            moment = waiting.pop()
            process = subprocess.Popen(
                [*TRAIN, str(tmp_path / f"{moment:g}")], stderr=subprocess.PIPE, text=True
            )
            running.append((moment, time.monotonic(), process))
        for entry in list(running):
            moment, start, process = entry
            if time.monotonic() - start >= moment:
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=20)  # raises if it went on
                ended.append((moment, process.returncode, said))
                running.remove(entry)
        time.sleep(0.005)
    for moment, code, said in ended:
        if BEFORE_DEMUR not in said:
            assert code == 130, (moment, said)
            assert said.startswith("demur: stopped"), (moment, said)
            assert said.count("\n") == 1, (moment, said)
    assert sum(BEFORE_DEMUR in said for _, _, said in ended) <= MOMENTS // 2
