"""Figures as JSON values."""

from dataclasses import fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """Dataclasses and named tuples as dictionaries, all the way down."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return [plain(each) for each in value] if isinstance(value, tuple) else value
