"""From a spec that names rejectors and operating points to a callable with frozen thresholds.

    bound = bind(PGD(Linf(8/255), objective=Evasion(RCon()), criterion=AcceptedError(RCon(), TPR(0.95))), clean)
    bound.spec(model, x, y);  bound.thresholds

Rejectors are fitted on clean fit images, thresholds chosen on clean cal images, or on those that
the operating point names as its `split`: no attacked image and no test image is looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import torch

from demur.attacks.criteria import RuleCriterion
from demur.evaluate.record_scores import values
from demur.rejectors import FittedScore
from demur.rule import OperatingPoint, Rejector, Score, as_score
from demur.runs import Record
from demur.spec import Spec, show

S = TypeVar("S", bound=Spec)

CleanRecord = Callable[[str], Record]  # a split's name to its clean record, features included


@dataclass(frozen=True)
class BoundSpec(Generic[S]):
    """A callable spec, the thresholds frozen for it, and what its rejectors were fitted on."""

    spec: S
    thresholds: dict[str, float]
    fitted: dict[str, str]


@dataclass
class Binding:
    """One pass over a spec; remembers what it froze and fitted, by the text that asked for it."""

    clean: CleanRecord
    device: torch.device = torch.device("cpu")  # where fitted scores are to answer
    thresholds: dict[str, float] = field(default_factory=dict)
    fitted: dict[str, str] = field(default_factory=dict)

    def threshold(self, score: Score, at: OperatingPoint) -> float:
        """The threshold of a fitted score on clean images: cal unless the point says another."""
        seen = self.clean(at.split)  # refused in words where none were held out
        return at.threshold(values(score, seen), seen.correct)

    def bound(self, value: Any) -> Any:
        """`value` with every rejector below it fitted and every threshold frozen."""
        if isinstance(value, tuple):
            return tuple(self.bound(v) for v in value)
        if not isinstance(value, Spec):
            return value
        text = show(value)
        below = {f.name: self.bound(getattr(value, f.name)) for f in fields(value)}
        value = replace(value, **below)
        if isinstance(value, Rejector) and not isinstance(value, Score):
            fit = self.clean("fit")
            self.fitted[text] = fit.digest
            score = value.fit(fit.output, fit.y)
            return score.to(self.device) if isinstance(score, FittedScore) else score
        if isinstance(value, RuleCriterion) and isinstance(value.threshold, OperatingPoint):
            chosen = self.threshold(as_score(value.rejector), value.threshold)
            self.thresholds[text] = chosen
            return replace(value, threshold=chosen)
        return value


def bind_thresholds(
    spec: S, clean: CleanRecord, device: torch.device = torch.device("cpu")
) -> BoundSpec[S]:
    """The spec made callable with what the clean fit and cal records teach."""
    binding = Binding(clean, device)
    return BoundSpec(binding.bound(spec), binding.thresholds, binding.fitted)
