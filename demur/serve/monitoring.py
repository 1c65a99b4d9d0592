"""Structured logs, counters for Prometheus, and the test for drift of the rejection rate.

The log has one line per request, rejection, error or drift alarm.
"""

import logging
import math
import os
import re
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from io import FileIO, TextIOWrapper
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from time import monotonic, sleep
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from demur.errors import BadInput, visible
from demur.guards.decision import GuardResult

LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
MAX_LINES = 10_000  # that wait to be written
REQUEST_ID = re.compile(r"[\w.-]{1,64}")


class LineWriter:
    """Writes lines to standard error from a thread.

    Whoever stops reading them, such as a full pipe, stops no answer: further lines are dropped.
    """

    def __init__(self) -> None:
        self.stream, self.lines = sys.stderr, Queue[str](MAX_LINES)
        with suppress(OSError, ValueError, AttributeError):  # a stream that is no file
            # Not by sys.stderr, which the interpreter flushes at its exit.
            raw = FileIO(os.dup(sys.stderr.fileno()), "wb")
            self.stream = TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        Thread(target=self._write, name="log", daemon=True).start()

    def msg(self, line: str) -> None:
        """Queue a line."""
        with suppress(Full):
            self.lines.put_nowait(line)

    debug = info = warning = error = msg

    def _write(self) -> None:
        while True:
            line = self.lines.get()
            with suppress(OSError, ValueError):  # the stream was closed
                self.stream.write(f"{line}\n")
                self.stream.flush()
            self.lines.task_done()

    def close(self) -> None:
        """Wait for the queued lines, a second at most."""
        end = monotonic() + 1
        while self.lines.unfinished_tasks and monotonic() < end:
            sleep(0.01)


class LogHandler(logging.Handler):
    """Logs what libraries log, through the same writer: a full pipe must not stop them either."""

    def __init__(self, log: Any) -> None:
        super().__init__(logging.ERROR)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.log.error("server error", reason=record.getMessage().strip(), error=repr(error))


def make_logger(writer: LineWriter, form: str, level: str, guard: str) -> Any:
    """Return a logger whose lines name the guard."""
    last: Any = structlog.processors.JSONRenderer()
    if form == "text":
        first = ["timestamp", "level", "event"]
        last = structlog.processors.LogfmtRenderer(key_order=first, bool_as_flag=False)
    return structlog.wrap_logger(
        writer,
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _spelled_out,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
    ).bind(guard=guard)


def _spelled_out(_logger: Any, _method: str, values: Any) -> dict[str, Any]:
    """Control characters would reach the terminal of whoever reads the log."""
    return {name: visible(v) if isinstance(v, str) else v for name, v in values.items()}


def request_id(given: str | None) -> str:
    """Return the id that a proxy gave a request, or a new one."""
    return given if given and REQUEST_ID.fullmatch(given) else uuid4().hex


# Bets 1 + e u and 1 + e (3 u^2 - 1) / 2 on u = 2 p - 1: positive, and 1 on average for uniform p.
SHIFTS = np.array([-0.9, -0.4, 0.4, 0.9])
SPREADS = np.array([-0.9, 0.9])
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
WINDOW = 1000  # images of the recent rejection rate
PROCESSES = "PROMETHEUS_MULTIPROC_DIR"  # folder in which several processes add up their numbers
ALARM, RESET = "drift-alarm", "drift-reset"  # files in it
# By name: which value of several processes is shown, and what it means
GAUGES: dict[str, tuple[Literal["livesum", "max", "mostrecent"], str]] = {
    "queue_images": ("livesum", "Images that wait for the model."),
    "rejection_rate": ("mostrecent", f"Rejected share of the last {WINDOW} images."),
    "calibration_rejection_rate": ("max", "Rejected share of the calibration images."),
    "drift_statistic": ("max", "Evidence of drift of the scores."),
    "drift_level": ("max", "Images between false alarms without drift, on average at least."),
    "drift_alarm": ("max", "1 after an alarm."),
}


class DriftMonitor:
    """Shiryaev-Roberts statistic of bets against uniform ranks.

    Each score is ranked among the calibration scores and all scores so far. Without drift the
    ranks are independent and uniform, whatever the distribution (conformal p-values, Vovk et
    al. 2003).

    R_t = (1 + R_{t-1}) b(p_t) for each bet b; the statistic is the mean over the bets. R_t - t is a
    martingale without drift, so an alarm at R_t >= c comes on average after at least c images, and
    within n images with a probability of at most n / c. The images must be exchangeable without
    drift: frames of one video are not.

    `edges` and `counts` are the histogram of the calibration scores, `mean_run_length` is c, and
    `seed` is that of the random order of equal scores.
    """

    def __init__(
        self, edges: Iterable[float], counts: Iterable[int], mean_run_length: int = 100_000,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self.edges = np.array(list(edges), dtype=np.float64)
        self.calibration = np.array(list(counts), dtype=np.int64)
        if len(self.calibration) != len(self.edges) + 1 or mean_run_length < 1:
            raise BadInput("a histogram has one count more than edges; save the guard again")
        self.level = mean_run_length
        self.random = np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        """Forget all images and the alarm; the calibration scores stay."""
        self.counts = self.calibration.copy()
        self.bets = np.zeros(len(SHIFTS) + len(SPREADS))
        self.images = 0
        self.first_alarm: int | None = None  # number of the image

    def observe(self, scores: Iterable[float]) -> None:
        """Take in scores in the order of arrival; a score of NaN counts as the lowest.

        After an alarm scores are only counted, until a reset.
        """
        for score in scores:
            self.images += 1
            if self.alarm:
                continue
            lowest = math.isnan(score)
            bin_ = 0 if lowest else int(np.searchsorted(self.edges, score, side="right"))
            below, total = int(self.counts[:bin_].sum()), int(self.counts.sum())
            p = (below + self.random.random() * (int(self.counts[bin_]) + 1)) / (total + 1)
            self.counts[bin_] += 1
            u = 2 * p - 1
            factors = np.concatenate([1 + SHIFTS * u, 1 + SPREADS * (3 * u * u - 1) / 2])
            self.bets = (1 + self.bets) * factors
            if self.statistic >= self.level:
                self.first_alarm = self.images

    @property
    def statistic(self) -> float:
        return float(self.bets.mean())

    @property
    def alarm(self) -> bool:
        return self.first_alarm is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "alarm": self.alarm,
            "first_alarm": self.first_alarm,
            "statistic": self.statistic,
            "level": self.level,
            "images": self.images,
            "false_alarms": "without drift, a false alarm comes on average after at least "
            f"{self.level:,} images",
        }


class Metrics:
    """Requests, images, rejections and drift since the start, in the library of Prometheus.

    Several processes share an alarm and its reset by two files in the folder PROCESSES.
    """

    def __init__(
        self, monitor: DriftMonitor, calibration_rejection_rate: float, guard: str = ""
    ) -> None:
        self.monitor, self.calibration_rejection_rate = monitor, calibration_rejection_rate
        self.lock = threading.RLock()
        self.recent: list[bool] = []  # rejections, the last WINDOW
        self.images = self.reset_at = 0
        self.shared = Path(os.environ[PROCESSES]) if PROCESSES in os.environ else None
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="demur", registry=self.registry)
        self.requests = counter("requests", "Requests by path and status code.", ["path", "code"])
        self.classified = counter("images", "Images classified.")
        self.rejected = counter("rejected", "Images rejected.")
        self.alarms = counter("drift_alarms", "Drift alarms.")
        self.seconds = Histogram(
            "demur_request_seconds", "Time to answer a request.",
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        Gauge(
            "demur_guard", "1 for the guard that is served.", ["guard"], registry=self.registry,
            multiprocess_mode="max",
        ).labels(guard).set(1)  # fmt: skip
        self.gauges = {
            name: Gauge(f"demur_{name}", text, registry=self.registry, multiprocess_mode=mode)
            for name, (mode, text) in GAUGES.items()
        }

    def count_request(self, path: str, code: int, seconds: float) -> None:
        self.requests.labels(path, str(code)).inc()
        self.seconds.observe(seconds)

    def count_result(self, result: GuardResult) -> bool:
        """Count the decisions of one batch and test its scores; return whether this is an alarm."""
        rejected = (~result.accepted).tolist()
        with self.lock:
            self.images += len(rejected)
            self.classified.inc(len(rejected))
            self.rejected.inc(sum(rejected))
            self.recent = (self.recent + rejected)[-WINDOW:]
            before = self.drift()["alarm"]
            self.monitor.observe(result.scores[:, -1].tolist())
            if new := self.monitor.alarm and not before:
                self.alarms.inc()
                if self.shared is not None:
                    (self.shared / ALARM).touch()
            return new

    def drift(self) -> dict[str, Any]:
        """Return the state of the drift test; an alarm is that of any process."""
        elsewhere = False
        with self.lock:
            if self.shared is not None:
                reset, elsewhere = self.shared / RESET, (self.shared / ALARM).exists()
                if reset.exists() and reset.stat().st_mtime_ns != self.reset_at:
                    self.reset_at = reset.stat().st_mtime_ns
                    self.monitor.reset()
            return self.monitor.to_json() | {"alarm": self.monitor.alarm or elsewhere}

    def reset_drift(self) -> dict[str, Any]:
        """Start the drift test of every process anew."""
        with self.lock:
            if self.shared is not None:
                (self.shared / ALARM).unlink(missing_ok=True)
                (self.shared / RESET).touch()
            self.monitor.reset()
            return self.drift()

    @property
    def rejection_rate(self) -> float | None:
        """Share of the last images that were rejected; None before the first image."""
        return sum(self.recent) / len(self.recent) if self.recent else None

    def text(self, waiting: int) -> bytes:
        """Return everything in the text format of Prometheus, added up over processes."""
        with self.lock:
            drift, rate = self.drift(), self.rejection_rate
            values = (
                waiting, math.nan if rate is None else rate, self.calibration_rejection_rate,
                drift["statistic"], drift["level"], drift["alarm"],
            )  # fmt: skip
        for gauge, value in zip(self.gauges.values(), values, strict=True):
            gauge.set(value)
        registry = self.registry
        if PROCESSES in os.environ:
            MultiProcessCollector(registry := CollectorRegistry())
        return generate_latest(registry)
