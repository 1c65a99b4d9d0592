"""Scores that need no fitting: they are read off the net's own output.

score = RCon()           # confidence times A
score(model(x))          # one value per image, higher = more trusted
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from demur.errors import BadInput
from demur.field_types import Positive
from demur.output import (
    Output,
    con,
    energy,
    label_entry,
    log_con,
    log_probabilities,
    log_rcon,
    mask_label,
    rcon,
    rectifier_logit,
)
from demur.rectified import certainty, log_certainty
from demur.rule import Rejector, Score
from demur.spec import Spec

TINY = 1e-300  # a threshold of 0 has no logit


@dataclass(frozen=True)
class OutputScore(Spec, Score, Rejector, ABC):
    """A rejector that already is its score."""

    def fit(self, out: Output, y: Tensor) -> Self:
        """The score itself."""
        return self


@dataclass(frozen=True)
class LogitScore(OutputScore, ABC):
    """A score of the logits; tau divides them."""

    tau: Positive = 1.0


@dataclass(frozen=True)
class SigmoidScore(OutputScore, ABC):
    """A score that is the sigmoid of a logit."""

    @abstractmethod
    def logit(self, out: Output) -> Tensor:
        """The logit of the score."""

    def __call__(self, out: Output) -> Tensor:
        """The score, between 0 and 1."""
        return self.logit(out).sigmoid()

    def log_score(self, out: Output) -> Tensor:
        """Its log."""
        return logsigmoid(self.logit(out))

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """Its logit less that of t."""
        return self.logit(out) - _logit(t)


@dataclass(frozen=True)
class Con(LogitScore):
    """Confidence: the largest class probability."""

    def __call__(self, out: Output) -> Tensor:
        """The confidence."""
        return con(out, self.tau)

    def log_score(self, out: Output) -> Tensor:
        """Its log."""
        return log_con(out, self.tau)

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """The logit of the label's probability less that of t."""
        log_p, log_rest = _shares(out, self.tau, label)
        return log_p - log_rest - _logit(t)


@dataclass(frozen=True)
class RCon(LogitScore):
    """Rectified confidence: the paper's estimate of the probability of the true label."""

    def __call__(self, out: Output) -> Tensor:
        """Confidence times A."""
        return rcon(out, self.tau)

    def log_score(self, out: Output) -> Tensor:
        """Its log."""
        return log_rcon(out, self.tau)

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """The logit of the label's rectified probability less that of t."""
        log_p, log_rest = _shares(out, self.tau, label)
        a = rectifier_logit(out)
        without = torch.logaddexp(log_rest, log_p + logsigmoid(-a))  # one less p times A
        return log_p + logsigmoid(a) - without - _logit(t)


@dataclass(frozen=True)
class Rectifier(SigmoidScore):
    """A alone: what rectifies the confidence, without it."""

    def logit(self, out: Output) -> Tensor:
        """The first auxiliary output."""
        return rectifier_logit(out)


@dataclass(frozen=True)
class AcceptProbability(SigmoidScore):
    """The probability of answering, where the auxiliary output is the logit of abstaining."""

    def logit(self, out: Output) -> Tensor:
        """The logit of all classes together less that of abstaining."""
        return energy(out) - rectifier_logit(out)


@dataclass(frozen=True)
class ModelScore(OutputScore):
    """A score that the model brings itself, as the last of its auxiliary outputs."""

    def __call__(self, out: Output) -> Tensor:
        """What the model says."""
        if out.aux.shape[-1] == 0:
            raise BadInput(
                "the model brings no score of its own; wrap it as ModelWithScore(model, ...)"
            )
        return out.aux[:, -1]


@dataclass(frozen=True)
class ConMinusRectifier(LogitScore):
    """Confidence less A: the other construction of R-Con that the paper names."""

    def __call__(self, out: Output) -> Tensor:
        """The difference."""
        return certainty(out, "difference", self.tau)

    def log_score(self, out: Output) -> Tensor:
        """Its log, and a straight line where there is none."""
        return log_certainty(out, "difference", self.tau)[0]

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """The label's probability less A and t."""
        log_p, _ = _shares(out, self.tau, label)
        return log_p.exp() - rectifier_logit(out).sigmoid() - t


@dataclass(frozen=True)
class ProbabilityMargin(LogitScore):
    """The largest class probability less the second."""

    def __call__(self, out: Output) -> Tensor:
        """The margin."""
        first, second = log_probabilities(out, self.tau).exp().topk(2, dim=-1).values.unbind(-1)
        return first - second

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """The label's probability less the largest other one and t."""
        p = log_probabilities(out, self.tau).exp()
        return label_entry(p, label) - mask_label(p, label).amax(-1) - t


@dataclass(frozen=True)
class Entropy(LogitScore):
    """Minus the entropy of the class probabilities."""

    def __call__(self, out: Output) -> Tensor:
        """The sum of p log p."""
        logs = log_probabilities(out, self.tau)
        return (logs.exp() * logs).sum(-1)


@dataclass(frozen=True)
class MaxLogit(LogitScore):
    """The largest logit, over tau."""

    def __call__(self, out: Output) -> Tensor:
        """The logit of the answer."""
        return out.logits.amax(-1) / self.tau

    def accept_margin(self, out: Output, t: float, label: Tensor) -> Tensor:
        """The label's logit, over tau, less t."""
        return label_entry(out.logits, label) / self.tau - t


@dataclass(frozen=True)
class Energy(LogitScore):
    """Log-sum-exp of the logits: energy-based detection with the sign turned."""

    def __call__(self, out: Output) -> Tensor:
        """The negative free energy."""
        return energy(out, self.tau)


def _shares(out: Output, tau: float, label: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the probability of a label, and of all others together."""
    logs = log_probabilities(out, tau)
    return label_entry(logs, label), mask_label(logs, label).logsumexp(-1)


def _logit(t: float) -> float:
    """The logit of a threshold; at 1 that of all that a 32-bit float takes for 1."""
    t = max(t, TINY) if t < 1 else 1 - 2**-25
    return math.log(t) - math.log1p(-t)
