"""Two scores in sequence: the paper's coupled rejection (Theorem 1).

    Coupled(at=1 / (2 - xi)).rule(0.5)      # Con >= 1/(2 - xi), then R-Con >= 1/2

Wherever A is xi-accurate that rule accepts every right answer past the gate and no wrong one.
As a ranking, the second score orders those past the gate and all others come last.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from demur.output import Output
from demur.rejectors.direct import Con, RCon
from demur.rule import Rejector, Rule, Score, fitted
from demur.spec import Spec


@dataclass(frozen=True)
class Coupled(Spec, Score, Rejector):
    """Trust `then`, but only where `gate` reaches `at`; 1/2 is the least that Lemma 1 allows."""

    gate: Rejector | Score = Con()
    at: float = 1 / 2
    then: Rejector | Score = RCon()

    def fit(self, out: Output, y: Tensor) -> Self:
        """The same pair with both parts fitted."""
        gate, then = (
            part.fit(out, y) if isinstance(part, Rejector) else part
            for part in (self.gate, self.then)
        )
        return replace(self, gate=gate, then=then)

    def __call__(self, out: Output) -> Tensor:
        """The second score past the gate, minus infinity before it."""
        past = fitted(self.gate)(out) >= self.at
        return fitted(self.then)(out).masked_fill(~past, -torch.inf)

    def trust(self, out: Output) -> Tensor:
        """The second score to climb, less what is missing at the gate."""
        missing = (self.at - fitted(self.gate)(out)).clamp_min(0)
        return fitted(self.then).trust(out) - missing

    def rule(self, t: float) -> Rule:
        """Both thresholds as one rule."""
        return Rule(((fitted(self.gate), self.at), (fitted(self.then), t)))
