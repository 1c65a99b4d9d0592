"""Ctrl-C ends a command at any moment, with exit code 130 and one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")

# runs the command and sends SIGINT to itself when the command looks for its n-th module
INTERRUPTED = """
import os, runpy, signal, sys
left = int(sys.argv.pop(1))

class Interrupting:
    begun = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        global left
        cls.begun = cls.begun or name == "demur.cli.commands"
        left -= cls.begun
        if left == 0:
            left = -1
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
runpy.run_module("demur", run_name="__main__", alter_sys=True)
"""


def swallowing(body: str) -> subprocess.CompletedProcess[str]:
    script = f"import os, signal\nfrom demur.cli.interrupt import ctrl_c\n{body}"
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
        "import demur.cli.interrupt, time\ndemur.cli.interrupt.UNWIND_SECONDS = 0.2\n"
        "with ctrl_c(lambda: 'stopped'):\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException:\n        time.sleep(30)\n"
    )
    assert (done.returncode, done.stderr) == (130, "demur: stopped\n")


@pytest.mark.parametrize("imports", [1, 300, 1600])
def test_no_training_survives_ctrl_c_during_its_imports(imports: int, tmp_path: Path) -> None:
    """Python looks for about 2,300 modules before the first step."""
    words = ["train", "digits-pgdat-rr", "epochs=900", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(imports), *words],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("demur: stopped")
    assert done.stderr.count("\n") == 1
