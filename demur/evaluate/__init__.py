"""From a run and an attack to a record, and from records to rows."""

from demur.evaluate.archive import ArchiveKeepsLess, archive
from demur.evaluate.attack import AttackOptions, Evaluator, run_attack
from demur.evaluate.binding import BoundSpec, bind_thresholds
from demur.evaluate.record_scores import StoredScore, accepted, tcon_of, values
from demur.evaluate.score import (
    BASELINE,
    ORACLE,
    PROTOCOLS,
    Protocol,
    Ranking,
    Row,
    ScoredRecord,
    Scorer,
    Summary,
)

__all__ = [
    "BASELINE",
    "ORACLE",
    "PROTOCOLS",
    "ArchiveKeepsLess",
    "AttackOptions",
    "BoundSpec",
    "Evaluator",
    "Protocol",
    "Ranking",
    "Row",
    "ScoredRecord",
    "Scorer",
    "StoredScore",
    "Summary",
    "accepted",
    "archive",
    "bind_thresholds",
    "run_attack",
    "tcon_of",
    "values",
]  # fmt: skip
