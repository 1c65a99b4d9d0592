"""The interface of a data set: its images' domain, its usual threat model and its splits.

Digits().domain.classes, Digits().threat.linf
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from demur.data.images import SPLITS, SplitName, Splits
from demur.images import Domain
from demur.spec import Spec


class ThreatModel(NamedTuple):
    """The usual attack radii of a data set and their PGD step sizes, for pixels in [0, 1]."""

    linf: float
    linf_step: float
    l2: float
    l2_step: float


@dataclass(frozen=True)
class Dataset(Spec, ABC):
    """A data set that loads as named splits."""

    domain: ClassVar[Domain]
    threat: ClassVar[ThreatModel]

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The names of the splits that `load` returns."""
        return SPLITS

    @abstractmethod
    def load(self, folder: Path | None = None) -> Splits:
        """Load the splits from `folder`, or from where `demur.data.locations` finds the files."""
