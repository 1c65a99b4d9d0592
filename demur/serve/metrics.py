"""Counters of the service and their text in the format of Prometheus."""

import threading
from collections import Counter
from collections.abc import Iterator

from demur.guards.core import GuardResult
from demur.serve.drift import DriftMonitor

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
WINDOW = 1000  # images of the recent rejection rate


class Metrics:
    """Requests, images, rejections and drift since the start."""

    def __init__(self, monitor: DriftMonitor, calibration_rejection_rate: float) -> None:
        self.monitor, self.calibration_rejection_rate = monitor, calibration_rejection_rate
        self.lock = threading.Lock()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self.images = self.rejected = 0
        self.recent: list[bool] = []  # rejections, the last WINDOW

    def count_request(self, path: str, code: int, seconds: float) -> None:
        """Count one answered request."""
        with self.lock:
            self.requests[path, code] += 1
            bucket = sum(seconds > bound for bound in BUCKETS)
            self.buckets[bucket] += 1
            self.seconds += seconds

    def count_result(self, result: GuardResult) -> None:
        """Count the decisions of one batch and test its scores for drift."""
        rejected = (~result.accepted).tolist()
        with self.lock:
            self.images += len(rejected)
            self.rejected += sum(rejected)
            self.recent = (self.recent + rejected)[-WINDOW:]
            self.monitor.observe(result.scores[:, -1].tolist())

    @property
    def rejection_rate(self) -> float | None:
        """Share of the last images that were rejected; None before the first image."""
        return sum(self.recent) / len(self.recent) if self.recent else None

    def text(self, waiting: int) -> str:
        """Return everything in the text format of Prometheus."""
        with self.lock:
            return "\n".join(self._lines(waiting)) + "\n"

    def _lines(self, waiting: int) -> Iterator[str]:
        yield from _head("demur_requests_total", "counter", "Requests by path and status code.")
        for (path, code), count in sorted(self.requests.items()):
            yield f'demur_requests_total{{path="{path}",code="{code}"}} {count}'
        yield from _head("demur_request_seconds", "histogram", "Time to answer a request.")
        total = 0
        for bound, count in zip((*BUCKETS, "+Inf"), self.buckets, strict=True):
            total += count
            yield f'demur_request_seconds_bucket{{le="{bound}"}} {total}'
        yield f"demur_request_seconds_sum {self.seconds:.6f}"
        yield f"demur_request_seconds_count {total}"
        drift = self.monitor
        for name, kind, text, value in (
            ("images_total", "counter", "Images classified.", self.images),
            ("rejected_total", "counter", "Images rejected.", self.rejected),
            ("queue_images", "gauge", "Images that wait for the model.", waiting),
            ("rejection_rate", "gauge", f"Rejected share of the last {WINDOW} images.",
             self.rejection_rate),
            ("calibration_rejection_rate", "gauge", "Rejected share of the calibration images.",
             self.calibration_rejection_rate),
            ("drift_statistic", "gauge", "Evidence of drift of the scores.", drift.statistic),
            ("drift_level", "gauge", f"Level of an alarm: {drift.statement}.", drift.level),
            ("drift_alarm", "gauge", "1 after an alarm.", int(drift.alarm)),
            ("drift_alarms_total", "counter", "Drift alarms.", drift.alarms),
        ):  # fmt: skip
            if value is not None:
                yield from _head(f"demur_{name}", kind, text)
                yield f"demur_{name} {value:.9g}"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"
