"""Evaluation of a run: attacks to records, records to rows of a table.

binding    chooses thresholds on clean images (resolve_thresholds)
recording  runs an attack and writes its record (run_attack)
score      scores the rejectors on records, with intervals (RejectorEvaluation)
archive    copies a run without weights; a pack keeps features, for new rejectors
"""

from demur.evaluate.archive import ArchiveKeepsLess, archive, pack
from demur.evaluate.binding import BoundSpec, resolve_thresholds
from demur.evaluate.paired_counts import PairedCounts, compare, paired_shares
from demur.evaluate.record_scores import StoredScore, accepted, tcon_of, values
from demur.evaluate.recording import LoadedRun, RecordOptions, run_attack
from demur.evaluate.score import (
    BASELINE,
    ORACLE,
    PROTOCOLS,
    Protocol,
    Ranking,
    RejectorEvaluation,
    Row,
    ScoredRecord,
    Summary,
)

__all__ = [
    "BASELINE", "ORACLE", "PROTOCOLS", "ArchiveKeepsLess", "BoundSpec", "LoadedRun",
    "PairedCounts", "Protocol", "Ranking", "RecordOptions", "RejectorEvaluation", "Row",
    "ScoredRecord", "StoredScore", "Summary", "accepted", "archive", "compare", "pack",
    "paired_shares", "resolve_thresholds", "run_attack", "tcon_of", "values",
]  # fmt: skip
