"""The grades of a verdict, and records prepared for the sanity checks.

docs/guides/audit.md defines the grades. Evidence has parsed attacks, paired images and scores.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from demur.attacks import AcceptedError, Attack, Clean, Corruption, PlusLogScore
from demur.attacks.attack import RuleCriterion
from demur.attacks.balls import Ball
from demur.calibrate import binomial_sf
from demur.errors import BadInput
from demur.evaluate.record_scores import JsonFields, can_score, values
from demur.evaluate.score import RejectorEvaluation
from demur.metrics import BoolArray, FloatArray
from demur.metrics.checks import IntArray
from demur.metrics.intervals import student_p
from demur.recipes import VOCABULARY
from demur.rejectors.rule import Rejector, Score
from demur.runs import Record
from demur.spec import Spec, read, show, specs_in

MIN_IMAGES = 10  # fewer cannot show that a share of them is unusual
MIN_LEFT = 0.1  # of the images that are right without an attack; fewer are no robustness


class Grade(StrEnum):
    """The three grades of a verdict."""

    BROKEN = "broken"
    SUSPICIOUS = "suspicious"
    NO_SIGN = "no known sign of failure"


class Verdict(NamedTuple):
    """A grade and the sentences that explain it."""

    grade: Grade
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.grade}. {' '.join(self.reasons)}"

    def to_json(self) -> dict[str, Any]:
        return {"grade": str(self.grade), "reasons": list(self.reasons)}


SIGNIFICANCE = 0.01  # of one comparison
TOLERATED = 0.05  # share of images that may be unusual without a flag


def targeted_rules(attack: Attack) -> list[AcceptedError | PlusLogScore]:
    """Parts of an attack that name the rejector whose accepted errors it seeks."""
    return [part for part in specs_in(attack) if isinstance(part, AcceptedError | PlusLogScore)]


def ball_of(attack: Attack) -> Ball | None:
    """The ball of an attack; None if it has none or several, or is not confined to it."""
    balls = attack.balls()
    return balls.pop() if len(balls) == 1 else None


def rebuilt(spec: Any, change: Callable[[Spec, dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a spec, and of those inside but rejectors, with the field values of `change`."""
    if isinstance(spec, tuple):
        return tuple(rebuilt(part, change) for part in spec)
    if not isinstance(spec, Spec) or isinstance(spec, Rejector):
        return spec
    values = {f.name: rebuilt(getattr(spec, f.name), change) for f in fields(spec)}
    return replace(spec, **change(spec, values))


@dataclass(frozen=True)
class Flag(JsonFields):
    """A sign that an evaluation overestimates robustness."""

    kind: str
    attacks: tuple[str, ...]
    observed: str  # observation, with numbers
    remedy: str


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: its flags, or what it needs to be made."""

    kind: str
    flags: tuple[Flag, ...] = ()
    missing: str = ""  # description of the missing record; empty if the check was made
    needed_attack: str = ""  # attack whose record the check needs


@dataclass(frozen=True, eq=False)
class ParsedRecord:
    """A record with its parsed attack, which is None if the spec can no longer be parsed."""

    record: Record
    attack: Attack | None
    name: str
    passes: BoolArray | None = None  # of a randomised model: what is correct, accepted; 2, P, N

    @cached_property
    def correct(self) -> BoolArray:
        """Correct predictions in each pass; P, N, with P = 1 unless there are `passes`."""
        return self.record.correct[None] if self.passes is None else self.passes[0, :]

    @cached_property
    def index(self) -> IntArray:
        """Positions of the images in their data set; N."""
        return np.asarray(self.record.arrays["index"].numpy())

    @property
    def ball(self) -> Ball | None:
        """The ball of the attack, as `ball_of` returns it."""
        return None if self.attack is None else ball_of(self.attack)


class Evidence:
    """Records of one split of a run, with the scores of its rejectors.

    None as the rejectors takes those of the evaluation's run, without one its scores.
    """

    def __init__(
        self, records: Sequence[ParsedRecord], evaluation: RejectorEvaluation,
        rejectors: Mapping[str, Rejector | Score] | None = None,
    ) -> None:  # fmt: skip
        self.evaluation, self.records = evaluation, list(records)
        if rejectors is None:
            loaded = evaluation.loaded
            rejectors = evaluation.scores if loaded is None else loaded.run.recipe.rejectors()
        self.rejectors = rejectors
        unattacked = Clean | Corruption
        self.attacked = [one for one in self.records if not isinstance(one.attack, unattacked)]
        clean = [one for one in self.records if isinstance(one.attack, Clean)]
        self.clean = max(clean, key=lambda one: len(one.index), default=None)
        self._values: dict[tuple[str, ParsedRecord], FloatArray | None] = {}

    def targeted(self, parsed: ParsedRecord) -> list[str]:
        """Names of the rejectors that an attack targets, at the thresholds of the evaluation."""
        parts = [] if parsed.attack is None else targeted_rules(parsed.attack)
        names = list[str]()
        for name in (name for name in self.rejectors if name in self.evaluation.thresholds):
            own = [part for part in parts if part.rejector == self.rejectors[name]]
            used = self.evaluation.thresholds[name]
            rules = [part for part in own if isinstance(part, AcceptedError)]
            at = [threshold_of(rule, parsed.record) for rule in rules]
            if own and (not at or any(t is not None and math.isclose(t, used) for t in at)):
                names.append(name)
        return names

    def values(self, name: str, parsed: ParsedRecord) -> FloatArray | None:
        """Score of a rejector for every image (N); None if the record cannot give it."""
        if (name, parsed) not in self._values:
            score = self.evaluation.score_for(name, parsed.record)
            available = can_score(score, parsed.record)
            self._values[name, parsed] = values(score, parsed.record) if available else None
        return self._values[name, parsed]

    def accepted(self, name: str, parsed: ParsedRecord) -> BoolArray | None:
        """Which images a rejector accepts at its threshold in each pass; P, N."""
        if parsed.passes is not None:
            return parsed.passes[1, :]
        found = self.values(name, parsed)
        return None if found is None else (found >= self.evaluation.thresholds[name])[None]

    def accepted_errors(self, name: str, parsed: ParsedRecord) -> BoolArray | None:
        """Which images are misclassified and accepted in each pass; P, N. "" accepts all."""
        accepted = self.accepted(name, parsed) if name else np.ones_like(parsed.correct)
        return None if accepted is None else accepted & ~parsed.correct


def threshold_of(part: RuleCriterion, record: Record) -> float | None:
    """Threshold of a criterion in the attack of a record; None if the record does not have it."""
    at = record.metadata["thresholds"].get(show(part), part.threshold)
    return float(at) if isinstance(at, int | float) else None


def common_images(one: ParsedRecord, other: ParsedRecord) -> tuple[IntArray, IntArray]:
    """Row numbers, in each record, of the images that both contain."""
    _, ours, theirs = np.intersect1d(
        one.index, other.index, assume_unique=True, return_indices=True
    )
    return ours, theirs


def too_many(unusual: int, total: int) -> bool:
    """Whether a share of images is significantly above TOLERATED."""
    return bool(binomial_sf(unusual, total, TOLERATED) < SIGNIFICANCE)


def p_above(values: BoolArray | FloatArray, level: float) -> float:
    """One-sided p that the mean of values (P passes, N images) is above a level.

    By the exact binomial test for one pass, else by Student's t. Its variance is that of the means
    of passes and that of the means of images: one draw may decide about all images of a pass.
    """
    if len(values) == 1:
        return float(binomial_sf(int(values.sum()), values.size, level))
    excess, means = float(values.mean()) - level, (values.mean(0), values.mean(1))
    if excess <= 0 or values.shape[1] == 1:
        return 1.0
    error = math.sqrt(sum(one.var(ddof=1) / len(one) for one in means))
    return student_p(excess / error, min(values.shape) - 1) / 2 if error else 0.0


def mean_count(found: BoolArray) -> str:
    """Mean number of images over passes, P, N."""
    return f"{round(found.sum() / len(found), 1):g}"


def share(part: BoolArray) -> str:
    """Share of true values as text, in percent."""
    return f"{100 * float(part.mean()):.1f}%"


def joined_names(names: Sequence[str]) -> str:
    """Names for a sentence: the first three and the number of others."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    *most, last = [*names[:3], *more]
    return f"{', '.join(most)} and {last}" if most else last


def parse_records(records: Sequence[Record]) -> list[ParsedRecord]:
    """Parse the attacks of records, named by their labels, with the number if labels are equal."""
    labels, found = Counter(record.label for record in records), list[ParsedRecord]()
    for record in records:
        attack = None
        with suppress(BadInput):  # one of its classes or fields no longer exists
            attack = read(str(record.metadata["spec"]), VOCABULARY)
        number = f" (n={len(record.y)})" if labels[record.label] > 1 else ""
        known = attack if isinstance(attack, Attack) else None
        found.append(ParsedRecord(record, known, record.label + number))
    return found
