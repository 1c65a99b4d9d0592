"""Success criteria: when an attack on an image has succeeded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from demur.output import Output, as_output, check_logits, prediction
from demur.rejectors.rule import OperatingPoint, Rejector, Rule, Score, Unresolved, as_score
from demur.spec import Spec


@dataclass(frozen=True)
class Criterion(Spec, ABC):
    """A success criterion: a predicate of the model's output and the true label.

    Attacks stop at an image once the criterion holds there. The objective is what an attack
    maximises; the criterion decides whether it has succeeded.
    """

    @abstractmethod
    def __call__(self, out: Output, y: Tensor) -> Tensor:
        """Return on which images the attack has succeeded, N, bool."""


@dataclass(frozen=True)
class Misclassified(Criterion):
    """Success is a wrong prediction, whether or not a rejector accepts it. It takes no arguments.

    Example:
        >>> import torch
        >>> from demur import PGD, Linf, Misclassified
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> attack = PGD(Linf(8 / 255), keep="success", criterion=Misclassified())
        >>> x_adv = attack(model, torch.rand(4, 1, 8, 8), torch.arange(4))
    """

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return is_wrong(out, y)


@dataclass(frozen=True)
class RuleCriterion(Criterion):
    """A criterion that depends on a rejector's decision; see `AcceptedError`."""

    rejector: Rejector | Score
    threshold: float | OperatingPoint

    @property
    def accept_rule(self) -> Rule:
        """The accept rule; raises Unresolved while the threshold is an operating point."""
        if isinstance(self.threshold, float):
            return as_score(self.rejector).rule(self.threshold)
        raise Unresolved(
            f"{self} has an operating point as threshold; call demur.resolve_thresholds first"
        )


@dataclass(frozen=True)
class AcceptedError(RuleCriterion):
    """Success is a wrong prediction that the rejector accepts.

    Args:
        rejector: The rejector or its score, for instance Con() or RCon().
        threshold: A number (accepted is score >= threshold) or an operating point such as
            TPR(0.95), which `resolve_thresholds` turns into a number.

    Example:
        >>> import torch
        >>> from demur import AcceptedError, Con, Output
        >>> logits, none = torch.tensor([[0.0, 3.0], [0.0, 0.1]]), torch.zeros(2, 0)
        >>> AcceptedError(Con(), 0.9)(Output(logits, none, none), y=torch.tensor([0, 0]))
        tensor([ True, False])
    """

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return is_wrong(out, y) & self.accept_rule.accepted(out)


@dataclass(frozen=True)
class FalseRejection(RuleCriterion):
    """Success is a correct prediction that the rejector rejects."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return ~is_wrong(out, y) & ~self.accept_rule.accepted(out)


@dataclass(frozen=True)
class Rejected(RuleCriterion):
    """Success is a rejected input, whether or not the prediction is correct."""

    def __call__(self, out: Output, y: Tensor) -> Tensor:
        return ~self.accept_rule.accepted(out)


def is_wrong(out: Output, y: Tensor) -> Tensor:
    """Return on which images the prediction is wrong, N; raise BadInput for logits of NaN."""
    out = as_output(out, rows=len(y))
    check_logits(out)
    return prediction(out) != y
