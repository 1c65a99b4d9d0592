"""What every data set says of itself, so that nets, recipes and attacks need not ask which it is.

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
    """The radii at which a data set is usually attacked, with PGD's step for each."""

    linf: float
    linf_step: float
    l2: float
    l2_step: float


@dataclass(frozen=True)
class Dataset(Spec, ABC):
    """A named source of splits."""

    domain: ClassVar[Domain]
    threat: ClassVar[ThreatModel]

    @property
    def splits(self) -> tuple[SplitName, ...]:
        """The splits that `load` gives."""
        return SPLITS

    @abstractmethod
    def load(self, folder: Path | None = None) -> Splits:
        """The splits, all four unless the spec says otherwise; `folder` is where data sets live."""
