"""Reports that take long: kept after every part, and gone on with where they were stopped."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reports:
    """Where a report is kept while it grows, and an earlier one that may hold parts of it."""

    keep: Callable[[dict[str, Any]], object] = lambda report: None
    earlier: dict[str, Any] = field(default_factory=dict)

    def known(self, report: dict[str, Any], parts: str) -> Any:
        """The parts of the earlier report, if it is about the same in all else; None if not."""
        alike = all(self.earlier.get(name) == report[name] for name in report if name != parts)
        return self.earlier.get(parts) if alike else None
