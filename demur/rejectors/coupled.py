"""Two scores in sequence: the paper's coupled rejection (Theorem 1).

    Coupled(gate_threshold=1 / (2 - xi)).rule(0.5)      # Con >= 1/(2 - xi), then R-Con >= 1/2

Wherever A is xi-accurate that rule accepts every right answer past the gate and no wrong one.
As a ranking, the second score orders those past the gate and all others come last.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from demur.output import Output
from demur.rejectors.outputs import Con, RCon
from demur.rule import Rejector, Rule, Score, as_score
from demur.spec import Spec


@dataclass(frozen=True)
class Coupled(Spec, Score, Rejector):
    """Trust `then`, but only where `gate` reaches `at`; 1/2 is the least that Lemma 1 allows."""

    gate: Rejector | Score = Con()
    gate_threshold: float = 1 / 2
    score: Rejector | Score = RCon()

    def fit(self, out: Output, y: Tensor) -> Self:
        """The same pair with both parts fitted."""
        gate, score = (
            part.fit(out, y) if isinstance(part, Rejector) else part
            for part in (self.gate, self.score)
        )
        return replace(self, gate=gate, score=score)

    def __call__(self, out: Output) -> Tensor:
        """The second score past the gate, minus infinity before it."""
        past = as_score(self.gate)(out) >= self.gate_threshold
        return as_score(self.score)(out).masked_fill(~past, -torch.inf)

    def log_score(self, out: Output) -> Tensor:
        """The second score to climb, less what is missing at the gate."""
        missing = (self.gate_threshold - as_score(self.gate)(out)).clamp_min(0)
        return as_score(self.score).log_score(out) - missing

    def rule(self, t: float) -> Rule:
        """Both thresholds as one rule."""
        return Rule(((as_score(self.gate), self.gate_threshold), (as_score(self.score), t)))
