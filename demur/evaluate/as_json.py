"""Results as JSON values."""

from dataclasses import fields, is_dataclass
from typing import Any


def to_json(value: Any) -> Any:
    """Convert dataclasses and named tuples to dictionaries, recursively."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return [to_json(item) for item in value] if isinstance(value, tuple) else value
