"""A few seconds of fuzzing, and that the harness notices what it looks for."""

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from tests import forked
from tests.fuzz import __main__ as fuzz_command
from tests.fuzz import command_lines, worker
from tests.fuzz.kinds import KINDS
from tests.fuzz.outcomes import OtherMeaning
from tests.fuzz.worker import run_case
from tests.samples import Samples

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")

CASES = dict.fromkeys(KINDS, (150, 150_000)) | {  # in the suite, and in all a million
    "argv": (30, 6_000), "bundle": (40, 20_000), "api": (60, 80_000),
    "stored": (80, 100_000),
}  # fmt: skip
SEED = 7


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, worker._hang)
    yield
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_no_input_ends_in_a_traceback(
    kind: str, tmp_path: Path, profiled: None, samples: Samples
) -> None:
    outcomes = set()
    for number in range(samples(*CASES[kind])):
        outcome, detail = run_case(kind, SEED, number, tmp_path)
        assert outcome in ("accepted", "refused"), f"{kind} {number}: {outcome}\n{detail}"
        outcomes.add(outcome)
    assert outcomes == {"accepted", "refused"}


def test_command_lines_cannot_write_to_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes: list[tuple[Path, Path]] = []
    monkeypatch.setattr(command_lines, "main", lambda: homes.append((Path.home(), Path.cwd())))
    for number in range(200):
        command_lines.argv(Random(number), tmp_path)
    assert set(homes) == {(tmp_path, tmp_path / "here")}
    options = {option for _, options in command_lines._command_words() for option in options}
    assert not any("completion" in option for option in options)


def _spin(random: Random, folder: Path) -> bool:
    while True:
        random.random()


def _grow(random: Random, folder: Path) -> bool:
    """Grow beyond the peak of this process, to which other tests may have added."""
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return len(b"1" * (1024 * worker._peak() - held + (200 << 20))) > 0


def _lie(random: Random, folder: Path) -> bool:
    raise OtherMeaning("another value")


def _break(random: Random, folder: Path) -> bool:
    raise KeyError("missing")


@pytest.mark.parametrize(
    ("case", "outcome"),
    [(_spin, "hang"), (_grow, "memory"), (_lie, "other meaning"), (_break, "traceback")],
)
def test_the_harness_notices_what_it_looks_for(
    case: object, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiled: None
) -> None:
    monkeypatch.setitem(KINDS, "bad", case)
    seconds = 0.3 if outcome == "hang" else 20.0  # a slow machine takes longer to fill its memory
    monkeypatch.setattr(worker, "CASE_SECONDS", seconds)
    monkeypatch.setattr(worker, "MAX_GROWTH", 50 << 10)
    assert run_case("bad", 0, 0, tmp_path)[0] == outcome


class ForkedWorker:
    """What the command uses of subprocess.Popen, without seconds of imports."""

    def __init__(self, words: list[str], **_: object) -> None:
        self.process = forked.popen(words[1:], Path(__file__).parents[1])
        self.stdout, self.stderr = self.process.stdout.buffer, self.process.stderr.buffer
        self.kill = self.process.kill

    def __enter__(self) -> "ForkedWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.wait()


def test_the_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    popen = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE)
    monkeypatch.setattr(fuzz_command, "subprocess", popen)
    monkeypatch.setattr(sys, "argv", ["tests.fuzz", "--cases", "3", "--only", "json"])
    assert fuzz_command.main() == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["kind", "accepted", "refused"]
    assert [row.split()[0] for row in rows] == ["json"]
