"""From a spec that names rejectors and operating points to a callable with frozen thresholds.

    bound = bind(PGD(Linf(8/255), goal=Evade(RCon()), criterion=Slips(RCon(), TPR(0.95))), source)
    bound.spec(model, x, y);  bound.thresholds

Rejectors are fitted on clean fit images, thresholds chosen on clean cal images: no attacked image
and no test image is looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

from demur.rule import OperatingPoint, Rejector, Score
from demur.runs import Record
from demur.spec import Spec, show

S = TypeVar("S", bound=Spec)

CleanRecord = Callable[[str], Record]  # a split's name to its clean record, features included


@dataclass(frozen=True)
class Bound(Generic[S]):
    """A callable spec and what was frozen to make it so."""

    spec: S
    thresholds: dict[str, float]


@dataclass
class Binding:
    """One pass over a spec; remembers the thresholds it froze."""

    clean: CleanRecord
    thresholds: dict[str, float] = field(default_factory=dict)

    def threshold(self, score: Score, at: OperatingPoint | float) -> float:
        """The threshold of a fitted score on the clean cal images."""
        if isinstance(at, OperatingPoint):
            cal = self.clean("cal")
            chosen = at.threshold(score(cal.output).double().numpy(), cal.correct)
            self.thresholds[f"{show(score)} at {show(at)}"] = chosen
            return chosen
        return at

    def bound(self, value: Any) -> Any:
        """`value` with every rejector below it fitted and every threshold frozen."""
        if isinstance(value, tuple):
            return tuple(self.bound(v) for v in value)
        if not (isinstance(value, Spec) and is_dataclass(value)):
            return value
        below = {f.name: self.bound(getattr(value, f.name)) for f in fields(value)}
        value = replace(value, **below)
        if isinstance(value, Rejector) and not isinstance(value, Score):
            fit = self.clean("fit")
            return value.fit(fit.output, fit.y)
        freeze = getattr(value, "bound", None)
        return freeze(self) if freeze else value


def bind(spec: S, clean: CleanRecord) -> Bound[S]:
    """The spec made callable with what the clean fit and cal records teach."""
    binding = Binding(clean)
    return Bound(binding.bound(spec), binding.thresholds)
