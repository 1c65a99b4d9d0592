"""Rejectors: how far an answer can be trusted."""

from demur.rejectors.coupled import Coupled
from demur.rejectors.density import KD, KNN, LID
from demur.rejectors.direct import (
    Answers,
    Aux,
    Con,
    Difference,
    Energy,
    Entropy,
    Given,
    MaxLogit,
    ProbabilityMargin,
    RCon,
)
from demur.rejectors.fitted import Fitted, TooFew
from demur.rejectors.gaussian import GDA, GMM, GDAStar
from demur.rejectors.usual import READ_OFF, learned_from, tried_on
from demur.rejectors.vim import ViM
from demur.rule import Rejector
from demur.spec import Spec

REJECTORS: tuple[type[Spec], ...] = (
    Con, RCon, Difference, Aux, Answers, Energy, ProbabilityMargin, Entropy, MaxLogit, Given,
    Coupled, KD, LID, KNN, GDA, GDAStar, GMM, ViM,
)  # fmt: skip

__all__ = [
    "GDA", "GMM", "KD", "KNN", "LID", "READ_OFF", "REJECTORS", "Answers", "Aux", "Con", "Coupled",
    "Difference", "Energy", "Entropy", "Fitted", "GDAStar", "Given", "MaxLogit",
    "ProbabilityMargin", "RCon", "Rejector", "TooFew", "ViM", "learned_from", "tried_on",
]  # fmt: skip
