"""The quantities of the paper's theory, measured on records."""

from demur.evaluate.theory.ball import WorstCaseXi, XiBelow
from demur.evaluate.theory.proportions import Proportion, outputs_at
from demur.evaluate.theory.record import SMALL, RecordTheory, evaluate_record
from demur.evaluate.theory.report import GAMMAS, RHO, Difficulty, TheoryReport, theory

__all__ = [
    "GAMMAS", "RHO", "SMALL", "Difficulty", "Proportion", "RecordTheory", "TheoryReport",
    "WorstCaseXi", "XiBelow", "evaluate_record", "outputs_at", "theory",
]  # fmt: skip
