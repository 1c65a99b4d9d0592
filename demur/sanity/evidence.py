"""Records prepared for the sanity checks: parsed attacks and their order by strength,
paired images and cached scores.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from demur.attacks import (
    CE,
    PGD,
    AcceptedError,
    Attack,
    Clean,
    Corruption,
    Misclassified,
    PlusLogScore,
)
from demur.attacks.balls import Ball
from demur.attacks.criteria import RuleCriterion
from demur.calibrate import binomial_sf
from demur.errors import BadInput
from demur.evaluate.record_scores import JsonFields, can_score, values
from demur.evaluate.score import RejectorEvaluation
from demur.metrics import BoolArray, FloatArray
from demur.metrics.checks import IntArray
from demur.recipes import NAMED_ATTACKS, VOCABULARY, Recipe
from demur.rejectors.rule import Rejector, Score
from demur.runs import Record
from demur.spec import Spec, read, show, specs_in

SIGNIFICANCE = 0.01  # of one comparison
TOLERATED = 0.05  # share of images that may be unusual without a flag


def weaker(one: Attack, other: Attack) -> bool:
    """Whether `one` should break no more images than `other`.

    Only undisputed pairs are ordered; no conclusion is drawn from any other pair.
    """
    if isinstance(other, Clean) or isinstance(one, Clean):
        return not isinstance(other, Clean)
    if ball_of(one) != ball_of(other):
        return False
    if smaller_budget(one, other):
        return True
    parts, enough = other.parts, one.gradient_queries <= other.gradient_queries
    by_part = any(not_larger(one, part) for part in parts)
    return by_part or (bool(parts) and is_plain(one) and enough)


def smaller_budget(one: Attack, other: Attack) -> bool:
    """Whether both are the same attack and `one` has a smaller budget."""
    return not_larger(one, other) and not not_larger(other, one)


def not_larger(one: Any, other: Any) -> bool:
    """Whether both are the same attack except for seeds, and no budget of `one` is larger."""
    if type(one) is not type(other) or not isinstance(one, Attack):
        return bool(one == other)
    for f in fields(one):
        ours, theirs = getattr(one, f.name), getattr(other, f.name)
        if f.name in one.budget_fields:
            if theirs is not None and (ours is None or ours > theirs):  # None has no limit
                return False
        elif f.name == "keep":
            if (ours, theirs) == ("success", "max_objective"):
                return False
        elif f.name != "seed" and not not_larger(ours, theirs):
            return False
    return True


def weaker_against(one: Attack, other: Attack) -> bool:
    """Whether `one` should cause no more accepted errors of the rejector that `other` targets."""
    if isinstance(one, Clean):
        return True
    if ball_of(one) != ball_of(other):
        return False
    enough = one.gradient_queries <= other.gradient_queries
    return smaller_budget(one, other) or (is_plain(one) and enough)


def targeted_rules(attack: Attack) -> list[AcceptedError | PlusLogScore]:
    """Parts of an attack that name the rejector whose accepted errors it seeks."""
    return [part for part in specs_in(attack) if isinstance(part, AcceptedError | PlusLogScore)]


def is_plain(attack: Attack) -> bool:
    """Whether an attack is PGD on the cross-entropy."""
    parts = (CE(), Misclassified())
    return isinstance(attack, PGD) and (attack.objective, attack.criterion) == parts


def ball_of(attack: Attack) -> Ball | None:
    """The ball of an attack; None if it has none or several, or is not confined to it."""
    balls = attack.balls()
    return balls.pop() if len(balls) == 1 else None


def rebuilt(spec: Any, change: Callable[[Spec, dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of a spec, and of those inside it, with the field values that `change` returns."""
    if isinstance(spec, tuple):
        return tuple(rebuilt(part, change) for part in spec)
    if not isinstance(spec, Spec):
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

    @cached_property
    def correct(self) -> BoolArray:
        return self.record.correct

    @cached_property
    def index(self) -> IntArray:
        """Positions of the images in their data set; N."""
        index: IntArray = self.record.arrays["index"].numpy()
        return index

    @property
    def ball(self) -> Ball | None:
        """The ball of the attack, as `ball_of` returns it."""
        return None if self.attack is None else ball_of(self.attack)


class Evidence:
    """Records of one split of a run, with the scores of its rejectors.

    None as the rejectors takes those of the recipe in the records.
    """

    def __init__(
        self,
        records: Sequence[ParsedRecord],
        evaluation: RejectorEvaluation,
        rejectors: Mapping[str, Rejector | Score] | None = None,
    ) -> None:
        self.evaluation, self.records = evaluation, list(records)
        if rejectors is None:
            texts = {str(one.record.metadata.get("recipe", "")) for one in self.records}
            recipes = (found for found in map(_parse, texts) if isinstance(found, Recipe))
            rejectors = next((recipe.rejectors() for recipe in recipes), {})
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
        """Which images a rejector accepts at its threshold; N."""
        found = self.values(name, parsed)
        return None if found is None else found >= self.evaluation.thresholds[name]

    def accepted_errors(self, name: str, parsed: ParsedRecord) -> BoolArray | None:
        """Which images are misclassified and accepted; N."""
        accepted = self.accepted(name, parsed)
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


def mcnemar_p_value(first: BoolArray, second: BoolArray) -> float:
    """Exact one-sided p of McNemar's test that `first` holds more often than `second`."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return float(binomial_sf(only_first, only_first + only_second, 0.5))


def too_many(unusual: int, total: int) -> bool:
    """Whether a share of images is significantly above TOLERATED."""
    return bool(binomial_sf(unusual, total, TOLERATED) < SIGNIFICANCE)


def share(part: BoolArray) -> str:
    """Share of true values as text, in percent."""
    return f"{100 * float(part.mean()):.1f}%"


def most_significant(
    found: Sequence[tuple[str, BoolArray, BoolArray]],
) -> tuple[float, str, BoolArray, BoolArray, str] | None:
    """Of rejectors with two answers for each image, that whose first one holds more often.

    Returns the smallest p-value, the rejector with its answers, and words about others that are
    significant, too; None if no rejector is.
    """
    tested = [(mcnemar_p_value(a, b), name, a, b) for name, a, b in found]
    tested = [one for one in tested if one[0] < SIGNIFICANCE / len(found)]
    if not tested:
        return None
    ranked = sorted(tested, key=lambda one: (one[0], -float(one[2].mean()), one[1]))
    (p, name, first, second), *others = ranked
    also = f"; the same with {joined_names([one[1] for one in others])}" if others else ""
    return p, name, first, second, also


def joined_names(names: Sequence[str]) -> str:
    """Names for a sentence: the first three and the number of others."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    *most, last = [*names[:3], *more]
    return f"{', '.join(most)} and {last}" if most else last


def is_named_attack(record: Record) -> bool:
    """Whether the label of a record is a named attack, with or without changes."""
    return record.label.partition(":")[0] in NAMED_ATTACKS


def with_change(label: str, key: str, value: str) -> str:
    """Label of a named attack with one more change, as the command takes it."""
    name, _, changes = label.partition(":")
    others = [c for c in changes.split(",") if c and not re.match(rf"(\w+\.)?{key}=", c)]
    return f"{name}:{','.join([*others, f'{key}={value}'])}"


def parse_records(records: Sequence[Record]) -> list[ParsedRecord]:
    """Parse the attacks of records, named by their labels, with the number if labels are equal."""
    labels, found = Counter(record.label for record in records), list[ParsedRecord]()
    for record in records:
        attack = _parse(str(record.metadata["spec"]))
        number = f" (n={len(record.y)})" if labels[record.label] > 1 else ""
        known = attack if isinstance(attack, Attack) else None
        found.append(ParsedRecord(record, known, record.label + number))
    return found


def _parse(text: str) -> object:
    """Spec of a text; None if one of its classes or fields no longer exists."""
    try:
        found: object = read(text, VOCABULARY)
    except BadInput:
        return None
    return found
