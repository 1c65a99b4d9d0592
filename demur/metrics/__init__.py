"""Measures of a rejector; NumPy only, exact under ties, defined for empty groups."""

from demur.metrics.areas import auroc_difference, auroc_interval
from demur.metrics.checks import BoolArray, FloatArray
from demur.metrics.intervals import (
    Difference,
    Interval,
    bootstrap,
    paired_difference,
    percentiles,
    redrawn_difference,
    wilson,
)
from demur.metrics.redraws import Redraws
from demur.metrics.rejection import (
    Curve,
    Operating,
    accuracy,
    augrc,
    aurc,
    auroc,
    eaurc,
    ece,
    fpr_at_tpr,
    operating_point,
    paper_operating_point,
    paper_threshold,
    risk_coverage,
    threshold_at_tpr,
    verdict_point,
)

__all__ = [
    "BoolArray",
    "Curve",
    "Difference",
    "FloatArray",
    "Interval",
    "Operating",
    "Redraws",
    "accuracy",
    "augrc",
    "aurc",
    "auroc",
    "auroc_difference",
    "auroc_interval",
    "bootstrap",
    "eaurc",
    "ece",
    "fpr_at_tpr",
    "operating_point",
    "paired_difference",
    "paper_operating_point",
    "paper_threshold",
    "percentiles",
    "redrawn_difference",
    "risk_coverage",
    "threshold_at_tpr",
    "verdict_point",
    "wilson",
]
