"""Two scores in sequence: the paper's coupled rejection (Theorem 1).

    Coupled(gate_threshold=1 / (2 - xi)).rule(0.5)      # Con >= 1/(2 - xi) and R-Con >= 1/2

Where A is xi-accurate and con > 1/(2 - xi), this rule accepts every correct prediction and rejects
every wrong one.
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
    """`score` where `gate` reaches its threshold, and -inf elsewhere.

        value = score(out) if gate(out) >= gate_threshold else -inf

    Args:
        gate: The first score; the paper couples with the confidence.
        gate_threshold: Threshold of the gate; 1/2 is the smallest that Lemma 1 allows.
        score: The second score, which orders the images that pass the gate.

    Example:
        >>> from demur import Con, Coupled, RCon
        >>> rule = Coupled(Con(), gate_threshold=0.6, score=RCon()).rule(0.5)
    """

    gate: Rejector | Score = Con()
    gate_threshold: float = 1 / 2
    score: Rejector | Score = RCon()

    def fit(self, out: Output, y: Tensor) -> Self:
        gate, score = (
            part.fit(out, y) if isinstance(part, Rejector) else part
            for part in (self.gate, self.score)
        )
        return replace(self, gate=gate, score=score)

    def __call__(self, out: Output) -> Tensor:
        passes_gate = as_score(self.gate)(out) >= self.gate_threshold
        return as_score(self.score)(out).masked_fill(~passes_gate, -torch.inf)

    def log_score(self, out: Output) -> Tensor:
        # the shortfall at the gate keeps a gradient where the score itself is -inf
        shortfall = (self.gate_threshold - as_score(self.gate)(out)).clamp_min(0)
        return as_score(self.score).log_score(out) - shortfall

    def rule(self, t: float) -> Rule:
        return Rule(((as_score(self.gate), self.gate_threshold), (as_score(self.score), t)))
