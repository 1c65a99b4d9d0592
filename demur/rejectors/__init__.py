"""Rejectors: how far an answer can be trusted."""

from demur.rejectors.coupled import Coupled
from demur.rejectors.direct import Con, Energy, RCon
from demur.rule import Rejector
from demur.spec import Spec

REJECTORS: tuple[type[Spec], ...] = (Con, RCon, Energy, Coupled)

__all__ = ["REJECTORS", "Con", "Coupled", "Energy", "RCon", "Rejector"]
