"""Run fuzzed inputs: python -m tests.fuzz --cases 1000 --seed 0 --only spec,json."""

import argparse
import json
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("spec", "json", "npz", "safetensors", "state", "argv", "bundle", "api", "stored")
OUTCOMES = ("accepted", "refused", "traceback", "hang", "memory", "other meaning", "crash")
FAILURES = OUTCOMES[2:]
MOST_SHOWN = 20
SILENCE_SECONDS = 60.0  # until a worker that prints nothing is killed
PROGRESS_SECONDS = 30.0  # between two lines on standard error


class Failure(NamedTuple):
    """A case that went wrong."""

    kind: str
    number: int
    outcome: str
    detail: str


class Result(NamedTuple):
    """The outcomes of one kind."""

    counts: Counter[str]
    failures: list[Failure]
    seconds: float


def fuzz(kind: str, seed: int, first: int, stop: int) -> Result:
    """Run the cases first..stop-1 of a kind in a worker, a new one after a crash or a hang."""
    total, failures, start = Counter[str](), list[Failure](), time.monotonic()
    begin, shown = first, start
    while first < stop:
        words = [sys.executable, "-m", "tests.fuzz.worker", kind, str(seed), str(first), str(stop)]
        counts, done = Counter[str](), first
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
            for line in _lines(worker):
                event = json.loads(line)
                if "next" in event:
                    counts, done = Counter(event["counts"]), event["next"]
                else:
                    failures.append(
                        Failure(kind, event["failed"], event["outcome"], event["detail"])
                    )
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    _show_progress(kind, f"{done - begin:,} of {stop - begin:,}", total + counts)
            worker.kill()
            said = worker.stderr.read().decode()[-1000:] if worker.stderr else ""
        total += counts
        if done < stop:  # one of the cases since the last report
            failures.append(Failure(kind, done, "crash", said))
            total["crash"] += 1
        first = done + 1 if done < stop else stop
    return Result(total, failures, time.monotonic() - start)


def _show_progress(kind: str, done: str, counts: Counter[str]) -> None:
    """Print the outcomes so far: a run that is stopped has then told what it found."""
    text = ", ".join(f"{counts[name]:,} {name}" for name in OUTCOMES if counts[name])
    print(f"{kind}: {done} cases: {text}", file=sys.stderr, flush=True)


def _lines(worker: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """Lines that a worker prints, until it ends or is silent for too long."""
    assert worker.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.select(SILENCE_SECONDS):
            content = worker.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not content:
                break
            *whole, rest = (rest + content).split(b"\n")
            yield from whole


def main() -> int:
    """Print a table of outcomes and every failure; return 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=1000, help="number of cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, separated by commas")
    asked = parser.parse_args()
    failures: list[Failure] = []
    print(f"{'kind':12}", *(f"{name:>13}" for name in (*OUTCOMES, "seconds")))
    for kind in asked.only.split(","):
        result = fuzz(kind, asked.seed, asked.first, asked.first + asked.cases)
        cells = (f"{result.counts[name]:13,}" for name in OUTCOMES)
        print(f"{kind:12}", *cells, f"{result.seconds:13.0f}", flush=True)
        failures += result.failures
    for failure in failures[:MOST_SHOWN]:
        print(f"\n{failure.kind} {failure.number}: {failure.outcome}\n{failure.detail}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
