"""The three grades of a verdict, on an audit or a retrofit; docs/guides/audit.md defines them."""

from enum import StrEnum
from typing import Any, NamedTuple

MIN_IMAGES = 10  # fewer cannot show that a share of them is unusual
MIN_LEFT = 0.1  # of the images that are right without an attack; fewer are no robustness


class Grade(StrEnum):
    """The three grades of a verdict."""

    BROKEN = "broken"
    SUSPICIOUS = "suspicious"
    NO_SIGN = "no known sign of failure"


class Verdict(NamedTuple):
    """A grade and the sentences that explain it."""

    grade: Grade
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.grade}. {' '.join(self.reasons)}"

    def to_json(self) -> dict[str, Any]:
        return {"grade": str(self.grade), "reasons": list(self.reasons)}
