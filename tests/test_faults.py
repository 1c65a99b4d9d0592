"""A disk that fails or is full at any file operation: one sentence, and nothing is lost.

A forked child runs a command and gets an error from its k-th file operation. The same command,
given again, must end with the files of a command that met no error. `make exhaustive` tests every
operation, the suite a few of each command.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demur.files.checked_files import read_json, write_json
from demur.runs import Run
from tests import forked
from tests.samples import Samples

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

ERRORS = (errno.EIO, errno.ENOSPC)
NEVER = 10**9
BRIEF = ("epochs=2", "width=4", "validation_attack=Clean")
COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {  # words, and how many operations are sampled
    "train": (("train", "digits-standard", *BRIEF, "--out", "run"), 2),
    "attack": (("attack", "run", "pgd-10:steps=1", "--n", "20"), 3),
    "calibrate": (("calibrate", "run", "--risk", "0.7"), 2),
    "report": (("report", "run"), 1),
}
ROOT = Path(__file__).parents[1]
Words = tuple[str, ...]
Answer = tuple[int, str, int]  # exit code, stderr, number of file operations
Server = Callable[..., Answer]
VARIES = ("created", "seconds", "metrics", "metadata_digest")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A process that runs commands with a fault, in a folder."""
    process = forked.popen(["-c", "from tests.fuzz.faults import serve; serve()"], ROOT)

    def run(command: Words, folder: Path, operation: int = NEVER, number: int = 0) -> Answer:
        asked = {"words": command, "folder": str(folder), "operation": operation}
        process.stdin.write(json.dumps(asked | {"number": number}) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        operations = int((folder / "operations").read_text())
        return code, (folder / "stderr").read_text(), operations

    yield run
    process.kill()


def content(run: Path) -> dict[str, object]:
    """What the files of a run say, without times."""
    found: dict[str, object] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.suffix == ".json":
            values = json.loads(path.read_text())
            found[name] = {key: value for key, value in values.items() if key not in VARIES}
        elif path.is_file() and path.suffix in (".npz", ".safetensors", ".txt"):
            found[name] = path.read_bytes()
        elif path.is_file():
            found[name] = path.name
    return found


def check_fault(
    server: Server, words: Words, start: Path, operation: int, number: int, expected: Any
) -> None:
    """One command with one fault, then the same command again."""
    folder = start.with_name(f"{start.name}-{operation}-{number}")
    shutil.copytree(start, folder)
    before = content(folder / "run")
    where = f"{words[0]}, operation {operation}, {os.strerror(number)}"
    code, said, _ = server(words, folder, operation, number)
    sentences = [line for line in said.splitlines() if line.startswith("demur: ")]
    if code != 0:  # 0: the fault met something that can be left out
        assert (code, len(sentences)) == (2, 1), f"{where}\n{said}"
        assert ("disk is full" if number == errno.ENOSPC else "input/output error") in said, where
    assert "Traceback" not in said, f"{where}\n{said}"
    after = content(folder / "run") if (folder / "run").exists() else {}
    assert {name: after.get(name) for name in before} == before, f"{where}: a file was lost"
    code, said, _ = server(words, folder)
    assert code == 0, f"{where}, again\n{said}"
    Run(folder / "run").tidy_finished()  # as the next command that writes does
    assert content(folder / "run") == expected, where
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_fails_loses_nothing(
    name: str, server: Server, tmp_path: Path, request: pytest.FixtureRequest, samples: Samples
) -> None:
    words, sampled = COMMANDS[name]
    start = tmp_path / "start"
    start.mkdir()
    if name != "train":
        run: Run = request.getfixturevalue("tiny_run")
        shutil.copytree(run.path, start / "run")
        checkpoint = start / "run" / "checkpoint.json"
        metadata = read_json(checkpoint, "")
        del metadata["data"]  # the server reads fewer images than the run was trained with
        write_json(checkpoint, metadata)
    if name == "report":
        assert server(("attack", "run", "clean", "--n", "30"), start)[0] == 0
    shutil.copytree(start, tmp_path / "whole")
    code, said, operations = server(words, tmp_path / "whole")
    assert code == 0, said
    expected = content(tmp_path / "whole" / "run")
    step = max(1, operations // samples(sampled, operations))
    for operation in (*range(0, operations - 1, step), operations - 1):
        numbers = ERRORS if step == 1 else (ERRORS[operation // step % 2],)
        for number in numbers:
            check_fault(server, words, start, operation, number, expected)
