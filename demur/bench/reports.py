"""Reports that take long: kept after every part, and gone on with where they were stopped."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from demur.errors import BadInput


@dataclass(frozen=True)
class Reports:
    """Where a report is kept while it grows, and an earlier one that may hold parts of it."""

    keep: Callable[[dict[str, Any]], object] = lambda report: None
    earlier: dict[str, Any] = field(default_factory=dict)

    def known(self, report: dict[str, Any], parts: str) -> Any:
        """The parts of the earlier report, which is refused if it is about something else."""
        if not self.earlier:
            return None
        about = {name: value for name, value in report.items() if name != parts}
        if others := _differing(about, self.earlier):
            raise BadInput(
                f"the report that is there is of another {', '.join(others)}, and is not "
                "overwritten; name another file with --out, or delete it"
            )
        return self.earlier.get(parts)


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names under which two reports differ; inside a dictionary, those in there."""
    names = []
    for name, value in ours.items():
        held = theirs.get(name)
        if isinstance(value, dict) and isinstance(held, dict):
            names += _differing(value, held)
        elif value != held:
            names.append(name)
    return names
