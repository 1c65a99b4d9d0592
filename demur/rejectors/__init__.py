"""Rejectors: scores of a net's output, higher for predictions to accept.

RCon()(net(x))                      # read off the output
KD().fit(out, y)(net(x))            # fitted to features of clean images
"""

from demur.rejectors.covariance import GDA, GMM, GDAStar, ViM
from demur.rejectors.density import KD, KNN, LID, REFERENCE_RIDGE_NAME, paper_grid
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
    RCon,
    Rectifier,
    SoftmaxMargin,
)
from demur.rejectors.rule import FittedScore, Rejector, Score, TooFewImages

# Every rejector: in `demur list`, in `demur score`, in the tests and in the documentation.
REJECTORS: list[type[Rejector]] = [
    Con, RCon, ConMinusRectifier, Rectifier, AcceptProbability, Energy, SoftmaxMargin, Entropy,
    MaxLogit, ModelScore, Coupled, KD, LID, KNN, GDA, GDAStar, GMM, ViM,
]  # fmt: skip

__all__ = [
    "GDA", "GMM", "KD", "KNN", "LID", "REFERENCE_RIDGE_NAME", "REJECTORS", "AcceptProbability",
    "Con", "ConMinusRectifier", "Coupled", "Energy", "Entropy", "FittedScore", "GDAStar",
    "MaxLogit", "ModelScore", "OutputScore", "RCon", "Rectifier", "Rejector", "Score",
    "SoftmaxMargin", "TooFewImages", "ViM", "paper_grid",
]  # fmt: skip
