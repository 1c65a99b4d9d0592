"""Structured logs of the service: one line per request, rejection, error or drift alarm.

log = make_logger("json", "info", guard.identity)
log.info("answered", path="/predict", code=200, request="7f3a", ms=4.2, accepted=[True])
"""

import logging
import re
import sys
from typing import Any
from uuid import uuid4

import structlog

from demur.errors import visible

LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
REQUEST_ID = re.compile(r"[\w.-]{1,64}")


def make_logger(form: str, level: str, guard: str) -> Any:
    """Return a logger to standard error whose lines name the guard."""
    last = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    )
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
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
