"""Choose thresholds on clean images and fit rejectors, so that a spec can be called.

Rejectors are fitted on clean fit images. Thresholds are chosen on clean cal images, or on the split
that the operating point names. No adversarial example is used, and a test image only if named.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from demur.attacks import Clean, Corruption, PlusLogScore, WorstScore
from demur.attacks.attack import RuleCriterion
from demur.errors import BadInput
from demur.evaluate.record_scores import values
from demur.recipes import rejector_name
from demur.rejectors import Coupled, FittedScore
from demur.rejectors.image_scores import image_rejectors
from demur.rejectors.rule import OperatingPoint, Rejector, Score, as_score
from demur.runs import Record
from demur.runs.record import attack_of
from demur.spec import Spec, show, specs_in

CLOSE = 1e-5  # relative difference of two thresholds that count as one
S = TypeVar("S", bound=Spec)

# Name of a split, and image rejectors whose scores it must have, to its clean record.
CleanRecord = Callable[..., Record]


@dataclass(frozen=True)
class BoundSpec(Generic[S]):
    """A spec that can be called, with the thresholds and fits that it uses."""

    spec: S
    thresholds: dict[str, float]  # that were chosen, by the text of their criterion
    fitted: dict[str, str]  # digests of the records of the fits, by the text of the rejector


@dataclass
class ThresholdResolver:
    """Fits rejectors and chooses thresholds in a spec, and collects what it fitted and chose."""

    clean: CleanRecord
    device: torch.device = torch.device("cpu")  # of the fitted scores
    thresholds: dict[str, float] = field(default_factory=dict)
    fitted: dict[str, str] = field(default_factory=dict)

    def choose_threshold(self, score: Score, at: OperatingPoint) -> float:
        """Threshold of a fitted score at an operating point, on clean images of its split."""
        record = self.clean(at.split, *image_rejectors(score))
        return at.threshold(values(score, record), record.correct)

    def bound(self, value: Any) -> Any:
        """Copy of `value` with every rejector in it fitted and every threshold chosen."""
        if isinstance(value, tuple):
            return tuple(self.bound(v) for v in value)
        if not isinstance(value, Spec):
            return value
        text = show(value)
        bound_fields = {f.name: self.bound(getattr(value, f.name)) for f in fields(value)}
        value = replace(value, **bound_fields)
        if isinstance(value, Rejector) and not isinstance(value, Score):
            fit = self.clean("fit")
            self.fitted[text] = fit.digest
            score = value.fit(fit.output, fit.y)
            return score.to(self.device) if isinstance(score, FittedScore) else score
        at = value.threshold if isinstance(value, RuleCriterion | WorstScore) else None
        if isinstance(at, OperatingPoint):
            self.thresholds[text] = self.choose_threshold(as_score(value.rejector), at)
            return replace(value, threshold=self.thresholds[text])
        return value


def other_aim(record: Record, rejector: Any, thresholds: Sequence[float]) -> str:
    """What an attack aims at if not at these thresholds of a rejector (two if coupled), or ""."""
    try:
        attack = attack_of(str(record.metadata["spec"]))
    except BadInput:  # of another version
        return ""
    if isinstance(attack, Clean | Corruption | WorstScore):  # the last aims at every threshold
        return ""
    kinds = RuleCriterion | PlusLogScore
    aims: list[Any] = [one for one in specs_in(attack) if isinstance(one, kinds)]
    for part in sorted(aims, key=lambda one: isinstance(one, PlusLogScore)):
        found = part.rejector
        at = record.metadata["thresholds"].get(show(part), getattr(part, "threshold", None))
        gate = [found.gate_threshold] if isinstance(found, Coupled) else []
        if found == rejector:
            other = isinstance(at, float) and not np.allclose([*gate, at], thresholds, CLOSE)
            return f"aimed at threshold {at:.4g}" if other else ""
    return f"aimed at {rejector_name(aims[0].rejector) if aims else 'no rejector'}"


def resolve_thresholds(
    spec: S, clean: CleanRecord, device: torch.device = torch.device("cpu")
) -> BoundSpec[S]:
    """Fit the rejectors of a spec and replace its operating points by thresholds.

    Args:
        spec: An attack, an objective or a criterion.
        clean: Function from the name of a split to its clean record, such as LoadedRun.clean.
        device: Device of the fitted scores.

    Returns:
        The spec that can be called, its thresholds and what its rejectors were fitted on. BadInput
        is raised if the data set lacks a split that is needed.

    Example:
        >>> loaded = LoadedRun(Run.open("digits-pgdat-rr"), "cpu")
        >>> criterion = AcceptedError(RCon(), TPR(0.95))
        >>> bound = resolve_thresholds(PGD(Linf(0.15), criterion=criterion), loaded.clean)
        >>> list(bound.thresholds)
        ['AcceptedError(RCon(), TPR(0.95))']
    """
    binding = ThresholdResolver(clean, device)
    return BoundSpec(binding.bound(spec), binding.thresholds, binding.fitted)
