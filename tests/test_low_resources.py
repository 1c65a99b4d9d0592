"""Too little memory, disk or descriptors: one true sentence, exit code 2, nothing half-written."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demur import errors
from demur.cli.commands import main
from demur.errors import DISK_FULL, FILE_SIZE, NO_FILES, NO_MEMORY, NO_THREADS, BadInput, lack
from demur.guards import Guard
from demur.report import page
from demur.runs import Run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and limits")
ROOT = Path(__file__).parents[1]
LACKS = [
    (MemoryError(), NO_MEMORY),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), NO_MEMORY),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9e9"), NO_MEMORY),
    (ImportError("libscipy.so: failed to map segment from shared object"), NO_MEMORY),
    (ImportError("libpng.so: cannot open shared object file: Too many open files"), NO_FILES),
    (OSError(errno.EMFILE, "Too many open files"), NO_FILES),
    (OSError(errno.ENOSPC, "No space left on device"), DISK_FULL),
    (OSError(errno.EFBIG, "File too large"), FILE_SIZE),
    (RuntimeError("can't start new thread"), NO_THREADS),
]


@pytest.mark.parametrize(("error", "sentence"), LACKS, ids=lambda value: str(value)[:25])
def test_what_is_lacking_is_named_wherever_it_is_met(error: Exception, sentence: str) -> None:
    """Also where a handler blames what it was reading, and where it hides the error."""
    assert lack(error) == sentence
    with pytest.raises(BadInput) as found:
        try:
            try:
                raise error
            except Exception:
                raise KeyError("data") from None
        except KeyError:
            raise BadInput("the file is damaged") from None
    assert str(found.value) == sentence


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "out of memory"), ImportError("no module named x"), KeyError("x"),
     RuntimeError("shapes do not fit"), BadInput("out of memory.png is damaged")],
)  # fmt: skip
def test_other_errors_keep_their_message(error: Exception) -> None:
    assert lack(error) is None
    with pytest.raises(BadInput, match=r"^the file is damaged$"):
        try:
            raise error
        except Exception:
            raise BadInput("the file is damaged") from None


def test_a_library_that_cannot_be_loaded_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(name: str) -> None:
        raise ImportError(f"{name}.so: cannot allocate memory in static TLS block")

    monkeypatch.setattr(errors, "import_module", no_memory)
    with pytest.raises(BadInput) as found:
        page.check_installed()
    assert str(found.value) == NO_MEMORY


def run_limited(words: list[str], folder: Path, limit: Callable[[], None]) -> tuple[int, str]:
    """Run a command in a child under a limit; return its exit code and what it wrote."""
    said = folder.parent / f"{folder.name}-said"
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        file = os.open(said, os.O_RDWR | os.O_CREAT)
        sys.argv, code = ["demur", *words], 0
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with os.fdopen(file, "w", buffering=1) as stream:
            sys.stdout = sys.stderr = stream
            limit()
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException as error:
                code = 1
                stream.write(f"Traceback: {error!r}")
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, said.read_text()


def descriptors(more: int) -> Callable[[], None]:
    def limit() -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more,) * 2)

    return limit


def file_size(most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most,) * 2)


@pytest.fixture
def folder(tiny_run: Run, tiny_guard: Guard, tmp_path: Path) -> Path:
    place = tmp_path / "here"
    shutil.copytree(tiny_run.path, place / "run")
    tiny_guard.save(place / "guard")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(place / "image.png")
    return place


LIMITS = [
    ("attack run pgd-10:steps=1 --n 20", file_size(2000), FILE_SIZE),
    ("export run -o other", file_size(2000), FILE_SIZE),
    ("calibrate run --coverage 0.5", file_size(900), FILE_SIZE),
    ("train digits-standard epochs=1 width=4 validation_attack=Clean --out other",
     file_size(3000), FILE_SIZE),
    ("attack run pgd-10:steps=1 --n 20", descriptors(1), NO_FILES),
    ("predict guard image.png", descriptors(0), NO_FILES),
    ("calibrate run --coverage 0.5", descriptors(1), NO_FILES),
]  # fmt: skip


@pytest.mark.parametrize(("words", "limit", "sentence"), LIMITS, ids=lambda value: str(value)[:20])
def test_a_command_under_a_limit_says_so_and_leaves_no_half_file(
    words: str, limit: Callable[[], None], sentence: str, folder: Path
) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, said = run_limited(words.split(), folder, limit)
    assert "Traceback" not in said
    assert (code, said.splitlines()[-1]) == (2, f"demur: {sentence}"), said
    assert {path: path.read_bytes() for path in before} == before
    for path in set(folder.rglob("*.json")) - before.keys():
        json.loads(path.read_text())
    assert not (folder / "other" / "model.safetensors").exists()


# No file can be opened from the import of one module on: a limit set earlier is met by whichever
# import of the installed versions needs the most descriptors, or by none.
LIMITED_IMPORT = """
import resource, sys

module = sys.argv.pop(1)

class Limiter:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))

sys.meta_path.insert(0, Limiter())
from demur.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["demur.cli.commands", "torch._C"])
def test_a_lack_during_the_imports_is_one_sentence(module: str) -> None:
    words = [sys.executable, "-c", LIMITED_IMPORT, module, "predict", "guard", "image.png"]
    run = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert (run.returncode, run.stderr.splitlines()[-1]) == (2, f"demur: {NO_FILES}"), run.stderr
    assert "Traceback" not in run.stderr
