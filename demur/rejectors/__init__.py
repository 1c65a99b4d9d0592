"""Rejectors: scores of a net's output, higher for predictions to accept.

RCon()(net(x))                      # read off the output
KD().fit(out, y)(net(x))            # fitted to features of clean images
"""

from demur.rejectors.defaults import OUTPUT_REJECTORS, fitted_rejectors, paper_grid
from demur.rejectors.density import KD, KNN, LID
from demur.rejectors.fitted import FittedScore, TooFewImages
from demur.rejectors.gaussian import GDA, GMM, GDAStar
from demur.rejectors.outputs import (
    AcceptProbability,
    Con,
    ConMinusRectifier,
    Coupled,
    Energy,
    Entropy,
    MaxLogit,
    ModelScore,
    RCon,
    Rectifier,
    SoftmaxMargin,
)
from demur.rejectors.vim import ViM
from demur.rule import Rejector
from demur.spec import Spec

REJECTORS: tuple[type[Spec], ...] = (
    Con, RCon, ConMinusRectifier, Rectifier, AcceptProbability, Energy, SoftmaxMargin, Entropy,
    MaxLogit, ModelScore, Coupled, KD, LID, KNN, GDA, GDAStar, GMM, ViM,
)  # fmt: skip

__all__ = [
    "GDA",
    "GMM",
    "KD",
    "KNN",
    "LID",
    "OUTPUT_REJECTORS",
    "REJECTORS",
    "AcceptProbability",
    "Con",
    "ConMinusRectifier",
    "Coupled",
    "Energy",
    "Entropy",
    "FittedScore",
    "GDAStar",
    "MaxLogit",
    "ModelScore",
    "RCon",
    "Rectifier",
    "Rejector",
    "SoftmaxMargin",
    "TooFewImages",
    "ViM",
    "fitted_rejectors",
    "paper_grid",
]  # fmt: skip
