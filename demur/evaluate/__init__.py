"""Evaluation of a run: attacks to records, records to rows of a table.

binding    chooses thresholds on clean images (bind_thresholds)
attack     runs an attack and writes its record (run_attack)
score      scores the rejectors on records, with intervals (Scorer)
archive    copies a run without weights, for a repository
"""

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
    "BASELINE", "ORACLE", "PROTOCOLS", "ArchiveKeepsLess", "AttackOptions", "BoundSpec",
    "Evaluator", "Protocol", "Ranking", "Row", "ScoredRecord", "Scorer", "StoredScore", "Summary",
    "accepted", "archive", "bind_thresholds", "run_attack", "tcon_of", "values",
]  # fmt: skip
