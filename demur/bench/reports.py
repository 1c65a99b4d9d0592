"""Reports of long benchmarks: saved after every part and resumed after an interruption."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from demur.errors import BadInput


@dataclass(frozen=True)
class Reports:
    """Saves a growing report and resumes from an earlier one."""

    keep: Callable[[dict[str, Any]], object] = lambda report: None
    earlier: dict[str, Any] = field(default_factory=dict)

    def known(self, report: dict[str, Any], parts: str) -> Any:
        """The entry `parts` of the earlier report, or None if there is none.

        Raises:
            BadInput: The two reports differ in anything but `parts`.
        """
        if not self.earlier:
            return None
        header = {name: value for name, value in report.items() if name != parts}
        if names := _differing_names(header, self.earlier):
            raise BadInput(
                f"the existing report has another {', '.join(names)} and is not overwritten; "
                "name another file with --out, or delete it"
            )
        return self.earlier.get(parts)


def _differing_names(report: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """The keys whose values differ; for nested dictionaries, the inner keys."""
    names = []
    for name, value in report.items():
        earlier_value = earlier.get(name)
        if isinstance(value, dict) and isinstance(earlier_value, dict):
            names += _differing_names(value, earlier_value)
        elif value != earlier_value:
            names.append(name)
    return names
