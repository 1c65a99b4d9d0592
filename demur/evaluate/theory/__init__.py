"""The paper's theory measured on records."""

from demur.evaluate.theory.ball import StaysLow, Throughout
from demur.evaluate.theory.record import SMALL, RecordTheory, of_record
from demur.evaluate.theory.report import GAMMAS, RHO, Difficulty, TheoryReport, theory
from demur.evaluate.theory.shares import Share, seen_at

__all__ = [
    "GAMMAS", "RHO", "SMALL", "Difficulty", "RecordTheory", "Share", "StaysLow", "TheoryReport",
    "Throughout", "of_record", "seen_at", "theory",
]  # fmt: skip
