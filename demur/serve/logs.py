"""Structured logs of the service: one line per request, rejection, error or drift alarm."""

import logging
import re
import sys
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import structlog

from demur.errors import visible

LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
MAX_LINES = 10_000  # that wait to be written
REQUEST_ID = re.compile(r"[\w.-]{1,64}")


class LineWriter:
    """Writes lines to standard error from a thread.

    Whoever stops reading them, such as a full pipe, stops no answer: further lines are dropped.
    """

    def __init__(self) -> None:
        self.stream, self.lines = sys.stderr, Queue[str](MAX_LINES)
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
