"""Rejectors: scores of a net's output, higher for predictions to accept."""

from demur.rejectors.feature_scores import (
    GDA,
    GMM,
    KD,
    KNN,
    LID,
    REFERENCE_RIDGE_NAME,
    GDAStar,
    ViM,
    paper_grid,
)
from demur.rejectors.image_scores import CPR, Consistency, ImageRejector
from demur.rejectors.output_scores import (
    AcceptProbability,
    Con,
    ConMinusRectifier,
    Coupled,
    Energy,
    Entropy,
    MaxLogit,
    ModelScore,
    OutputScore,
    PerClass,
    RCon,
    Rectifier,
    SoftmaxMargin,
)
from demur.rejectors.rule import FittedScore, Rejector, Score, TooFewImages

# Every rejector: in `demur list`, in `demur score`, in the tests and in the documentation.
REJECTORS: list[type[Rejector]] = [
    Con, RCon, ConMinusRectifier, Rectifier, AcceptProbability, Energy, SoftmaxMargin, Entropy,
    MaxLogit, ModelScore, Coupled, KD, LID, KNN, GDA, GDAStar, GMM, ViM,
    CPR, Consistency, PerClass,
]  # fmt: skip

__all__ = [
    "CPR", "GDA", "GMM", "KD", "KNN", "LID", "REFERENCE_RIDGE_NAME", "REJECTORS",
    "AcceptProbability", "Con", "ConMinusRectifier", "Consistency", "Coupled", "Energy", "Entropy",
    "FittedScore", "GDAStar", "ImageRejector",
    "MaxLogit", "ModelScore", "OutputScore", "PerClass", "RCon", "Rectifier", "Rejector", "Score",
    "SoftmaxMargin", "TooFewImages", "ViM", "paper_grid",
]  # fmt: skip
