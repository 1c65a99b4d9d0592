"""Metrics of rejectors; NumPy only, exact under ties, defined for empty groups."""

from demur.metrics.checks import BoolArray, FloatArray
from demur.metrics.intervals import (
    Difference,
    Interval,
    Resamples,
    Statistic,
    paper_accuracy,
    percentiles,
    resampled,
    resampled_difference,
    wilson,
)
from demur.metrics.rejection import (
    OperatingStats,
    WorstCase,
    accuracy,
    augrc,
    aurc,
    auroc,
    auroc_difference,
    auroc_interval,
    coverage_at_risk,
    eaurc,
    ece,
    fpr_at_tpr,
    paper_stats,
    risk_at_coverage,
    risk_coverage,
    stats_at_threshold,
    stats_of_verdicts,
)
from demur.metrics.thresholds import paper_threshold, threshold_at_tpr

__all__ = [
    "BoolArray", "Difference", "FloatArray", "Interval", "OperatingStats",
    "Resamples", "Statistic", "WorstCase", "accuracy", "augrc", "aurc", "auroc",
    "auroc_difference", "auroc_interval", "coverage_at_risk", "eaurc", "ece", "fpr_at_tpr",
    "paper_accuracy", "paper_stats", "paper_threshold", "percentiles", "resampled",
    "resampled_difference", "risk_at_coverage", "risk_coverage",
    "stats_at_threshold", "stats_of_verdicts", "threshold_at_tpr", "wilson",
]  # fmt: skip
