"""Scores that need no fitting: they are read off the net's own output.

score = RCon()           # confidence times A
score(model(x))          # one value per image, higher = more trusted
"""

from abc import ABC
from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.nn.functional import logsigmoid

from demur.declared import Positive
from demur.output import (
    Output,
    con,
    energy,
    log_con,
    log_probabilities,
    log_rcon,
    rcon,
    rectifier,
)
from demur.rule import Rejector, Score
from demur.spec import Spec


@dataclass(frozen=True)
class Direct(Spec, Score, Rejector, ABC):
    """A rejector that already is its score; tau divides the logits."""

    tau: Positive = 1.0

    def fit(self, out: Output, y: Tensor) -> Self:
        """The score itself."""
        return self


@dataclass(frozen=True)
class Con(Direct):
    """Confidence: the largest class probability."""

    def __call__(self, out: Output) -> Tensor:
        """The confidence."""
        return con(out, self.tau)

    def trust(self, out: Output) -> Tensor:
        """Its log."""
        return log_con(out, self.tau)


@dataclass(frozen=True)
class RCon(Direct):
    """Rectified confidence: the paper's estimate of the probability of the true label."""

    def __call__(self, out: Output) -> Tensor:
        """Confidence times A."""
        return rcon(out, self.tau)

    def trust(self, out: Output) -> Tensor:
        """Its log."""
        return log_rcon(out, self.tau)


@dataclass(frozen=True)
class Aux(Spec, Score, Rejector):
    """A alone: what rectifies the confidence, without it."""

    def fit(self, out: Output, y: Tensor) -> Self:
        """The score itself."""
        return self

    def __call__(self, out: Output) -> Tensor:
        """A, between 0 and 1."""
        return rectifier(out).sigmoid()

    def trust(self, out: Output) -> Tensor:
        """Its log."""
        return logsigmoid(rectifier(out))


@dataclass(frozen=True)
class ProbabilityMargin(Direct):
    """The largest class probability less the second."""

    def __call__(self, out: Output) -> Tensor:
        """The margin."""
        first, second = log_probabilities(out, self.tau).exp().topk(2, dim=-1).values.unbind(-1)
        return first - second


@dataclass(frozen=True)
class Entropy(Direct):
    """Minus the entropy of the class probabilities."""

    def __call__(self, out: Output) -> Tensor:
        """The sum of p log p."""
        logs = log_probabilities(out, self.tau)
        return (logs.exp() * logs).sum(-1)


@dataclass(frozen=True)
class MaxLogit(Direct):
    """The largest logit, over tau."""

    def __call__(self, out: Output) -> Tensor:
        """The logit of the answer."""
        return out.logits.amax(-1) / self.tau


@dataclass(frozen=True)
class Energy(Direct):
    """Log-sum-exp of the logits: energy-based detection with the sign turned."""

    def __call__(self, out: Output) -> Tensor:
        """The negative free energy."""
        return energy(out, self.tau)
