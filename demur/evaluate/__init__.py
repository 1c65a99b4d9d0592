"""Evaluation of a run: attacks to records, records to rows of a table."""

from demur.evaluate.archive import ArchiveKeepsLess, archive, pack
from demur.evaluate.binding import BoundSpec, resolve_thresholds
from demur.evaluate.paired_differences import PairedCounts, compare, paired_shares
from demur.evaluate.record_scores import StoredScore, accepted, tcon_of, values
from demur.evaluate.recording import LoadedRun, RecordOptions, run_attack
from demur.evaluate.score import (
    BASELINE,
    ORACLE,
    PROTOCOLS,
    Protocol,
    RejectorEvaluation,
    Row,
    ScoredRecord,
)

__all__ = [
    "BASELINE", "ORACLE", "PROTOCOLS", "ArchiveKeepsLess", "BoundSpec", "LoadedRun",
    "PairedCounts", "Protocol", "RecordOptions", "RejectorEvaluation", "Row",
    "ScoredRecord", "StoredScore", "accepted", "archive", "compare", "pack",
    "paired_shares", "resolve_thresholds", "run_attack", "tcon_of", "values",
]  # fmt: skip
