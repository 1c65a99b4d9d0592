"""Processes forked from one that has imported demur already: a start costs no seconds of imports.

    done = forked.run(["-m", "demur", "list"], cwd=folder)     # as subprocess.run
    process = forked.popen(["-c", "print('held')", "argument"])

Use `subprocess` where the start itself is tested.
"""

import atexit
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

PRELOADED = """
import torch, torch.distributed, torch._dynamo, numpy, scipy.stats, sklearn, rich
import matplotlib.figure, matplotlib.backends.backend_agg, matplotlib.backends.backend_svg, jinja2
import pydantic.type_adapter, torch.profiler  # as typer and torch do when used
import demur.cli.app, demur.recipes, demur.training, demur.evaluate, demur.guards
import demur.report.page, demur.sanity, demur.paper.comparisons
try:
    import typer._adapters  # not in typer 0.27
except ImportError:
    pass
"""
FEW_DIGITS = """
import time, demur.__main__
from demur.data import Digits, Images
load, batch = Digits.load, Images.batch
Digits.load = lambda *words: {{name: part.first({images}) for name, part in load(*words).items()}}
Images.batch = lambda *words: time.sleep({seconds}) or batch(*words)
demur.__main__.main()
"""


class Process:
    """A forked process: what tests use of subprocess.Popen, with text pipes."""

    def __init__(self, words: list[str], cwd: Path | None, env: dict[str, str] | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server())
        ends = [os.pipe() for _ in range(3)]
        asked = {"words": words, "cwd": str(cwd or Path.cwd()), "env": env or dict(os.environ)}
        message = json.dumps(asked).encode()
        theirs = [ends[0][0], ends[1][1], ends[2][1]]
        header = len(message).to_bytes(4, "big")
        socket.send_fds(self._socket, [header], theirs)
        self._socket.sendall(message)
        for fd in theirs:
            os.close(fd)
        self.stdin = os.fdopen(ends[0][1], "w")
        self.stdout = os.fdopen(ends[1][0])
        self.stderr = os.fdopen(ends[2][0])
        self._answers = self._socket.makefile()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float = 200) -> int:
        """Return the exit code, negative after a signal."""
        if self.returncode is None:
            self._socket.settimeout(timeout)
            self.returncode = int(self._answers.readline())
        return self.returncode

    def communicate(self, text: str = "", timeout: float = 200) -> tuple[str, str]:
        """Send text, wait, and return stdout and stderr, which must fit into their pipes."""
        self.stdin.write(text)
        self.stdin.close()
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()


def popen(words: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> Process:
    """Start `python *words`; words begin with -m demur or -c CODE."""
    return Process(words, cwd, env)


def run(
    words: list[str], cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` to its end; words begin with -m demur or -c CODE."""
    process = Process(words, cwd, env)
    out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def few_digits(images: int, seconds: float = 0.0) -> str:
    """The code of a process that runs the command with so many digits in each split.

    It waits some seconds at every batch, so that it can be killed before it ends.
    """
    return FEW_DIGITS.format(images=images, seconds=seconds)


@cache
def _server() -> str:
    """Return the address of the process that forks the others; the first caller starts it.

    The workers of pytest-xdist share one, which ends with the process that started them.
    """
    import fcntl

    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = Path(tempfile.gettempdir(), f"forks-{run}") if run else Path(tempfile.mkdtemp())
    folder.mkdir(mode=0o700, exist_ok=True)
    address = folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be starting it
        if not address.exists():
            tests = os.getppid() if run else os.getpid()
            words = [sys.executable, __file__, str(address), str(tests)]
            process = subprocess.Popen(words, stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
    return str(address)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _serve(address: str, tests: int) -> None:
    gc.disable()  # as in conftest.py
    sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed
    exec(PRELOADED, {})
    gc.freeze()
    gc.enable()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
    listening.settimeout(1)
    while _is_running(tests):
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            _supervise(connection)
        connection.close()
    shutil.rmtree(Path(address).parent)


def _supervise(connection: socket.socket) -> None:
    """Fork the process itself, tell its number, and its exit code when it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, fds, _, _ = socket.recv_fds(connection, 4, 3)
    size, message = int.from_bytes(header, "big"), b""
    while len(message) < size:
        message += connection.recv(size - len(message))
    pid = os.fork()
    if pid == 0:
        _become(json.loads(message), fds)
    for fd in fds:
        os.close(fd)
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(asked: dict[str, Any], fds: list[int]) -> None:
    """Run the command as a new interpreter would, and exit."""
    import runpy

    import torch

    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.path[:0] = [asked["cwd"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    kind, code, *rest = asked["words"]
    sys.argv = [code, *rest]
    try:
        if kind == "-m":
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        else:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code_number = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code_number = 1
    else:
        code_number = 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code_number)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
