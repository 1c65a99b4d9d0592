"""A process that runs cases of one kind under limits and prints one JSON line per event."""

import json
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from demur.errors import BadInput
from tests.fuzz.kinds import KINDS
from tests.fuzz.outcomes import OtherMeaning

CASE_SECONDS = 5.0  # of CPU time
MAX_GROWTH = 1 << 20  # kilobytes of resident memory in one case
ADDRESS_SPACE = 5 << 29  # bytes on top of what the imports have mapped
REPORT_SECONDS = 1.0


class Hang(BaseException):
    """A case took longer than CASE_SECONDS."""


def _hang(*_: object) -> None:
    raise Hang


def run_case(kind: str, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """Run one case and return its outcome, and what went wrong."""
    before = _peak()
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    try:
        accepted = KINDS[kind](Random(f"{seed}/{kind}/{number}"), folder)
        outcome, detail = ("accepted" if accepted else "refused"), ""
    except BadInput as error:
        outcome, detail = "refused", ""
        if "\n" in str(error) or len(str(error)) > 2000:
            outcome, detail = "traceback", f"not one sentence: {error!r}"[:300]
    except OtherMeaning as error:
        outcome, detail = "other meaning", str(error)
    except Hang:
        outcome, detail = "hang", ""
    except BaseException:
        outcome, detail = "traceback", traceback.format_exc()[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if _peak() - before > MAX_GROWTH:
        outcome, detail = "memory", f"{(_peak() - before) >> 10} MB {detail}"
    return outcome, detail


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(kind: str, seed: int, first: int, stop: int) -> None:
    """Run the cases first..stop-1; a line tells the next case and the outcomes so far."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _hang)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE,) * 2)
    counts, reported = Counter[str](), 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for number in range(first, stop):
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                _print({"next": number, "counts": counts})
            outcome, detail = run_case(kind, seed, number, Path(folder))
            counts[outcome] += 1
            if detail or outcome not in ("accepted", "refused"):
                _print({"failed": number, "outcome": outcome, "detail": detail})
    _print({"next": stop, "counts": counts})


def _print(event: dict[str, object]) -> None:
    sys.__stdout__.write(json.dumps(event) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:5]))
