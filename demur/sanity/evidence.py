"""Records as the sanity checks read them: attacks parsed, images paired, every score taken once."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from demur.attacks import AcceptedError, Attack, Clean, Evasion
from demur.attacks.criteria import RuleCriterion
from demur.calibrate import at_least
from demur.errors import BadInput
from demur.evaluate.as_json import plain
from demur.evaluate.record_scores import can_score, values
from demur.evaluate.score import Scorer
from demur.metrics import BoolArray, FloatArray
from demur.metrics.checks import IntArray
from demur.recipes import NAMED_ATTACKS, VOCABULARY, Recipe
from demur.rule import Rejector
from demur.runs import Record
from demur.sanity.attack_order import after
from demur.spec import read, show

SURE = 0.01  # the chance of a false alarm that one comparison may have
TOLERATED = 0.05  # the share of images that may be odd


@dataclass(frozen=True)
class Flag:
    """A sign that an evaluation says less than it seems to."""

    kind: str
    attacks: tuple[str, ...]
    seen: str  # with the numbers
    remedy: str

    def plain(self) -> dict[str, Any]:
        """The flag as JSON values."""
        told: dict[str, Any] = plain(self)
        return told


@dataclass(frozen=True)
class CheckResult:
    """What became of one check: its flags, or why it could not be made."""

    kind: str
    flags: tuple[Flag, ...] = ()
    lacks: str = ""  # in words; empty where the check was made
    wants: str = ""  # the attack whose record would allow it


@dataclass(frozen=True, eq=False)
class ParsedRecord:
    """One record; its attack is None where the spec can no longer be read."""

    record: Record
    attack: Attack | None
    name: str

    @cached_property
    def right(self) -> BoolArray:
        """Which answers are right."""
        return self.record.correct

    @cached_property
    def index(self) -> IntArray:
        """The places of the images in their data set."""
        places: IntArray = self.record.arrays["index"].numpy()
        return places


class Evidence:
    """All records of one split of a run."""

    def __init__(self, records: Sequence[Record], scoring: Scorer) -> None:
        self.scoring = scoring
        self.seen = [_seen(record, records) for record in records]
        self.attacked = [each for each in self.seen if not isinstance(each.attack, Clean)]
        untouched = [each for each in self.seen if isinstance(each.attack, Clean)]
        self.clean = max(untouched, key=lambda each: len(each.index), default=None)
        self._values: dict[tuple[str, ParsedRecord], FloatArray | None] = {}

    @cached_property
    def rejectors(self) -> dict[str, Rejector]:
        """The rejectors of the recipe by name."""
        told = {str(each.record.metadata.get("recipe", "")) for each in self.seen}
        recipes = [found for found in map(_parsed, told) if isinstance(found, Recipe)]
        return recipes[0].rejectors() if recipes else {}

    def aimed_at(self, seen: ParsedRecord) -> list[str]:
        """The rejectors that an attack is made to get past, at the thresholds frozen here."""
        parts = [] if seen.attack is None else after(seen.attack)
        return [
            name
            for name, rejector in self.rejectors.items()
            if name in self.scoring.thresholds
            and (own := [part for part in parts if part.rejector == rejector])
            and self._same_threshold(name, own, seen.record)
        ]

    def _same_threshold(
        self, name: str, parts: list[AcceptedError | Evasion], record: Record
    ) -> bool:
        """Whether an attack that knows a threshold knows the one in use."""
        frozen = [threshold_of(part, record) for part in parts if isinstance(part, AcceptedError)]
        used = self.scoring.thresholds[name]
        return not frozen or any(at is not None and math.isclose(at, used) for at in frozen)

    def values(self, name: str, seen: ParsedRecord) -> FloatArray | None:
        """A rejector's score of every image; None where the record does not allow it."""
        if (name, seen) not in self._values:
            score = self.scoring.of_record(name, seen.record)
            can = can_score(score, seen.record)
            self._values[name, seen] = values(score, seen.record) if can else None
        return self._values[name, seen]

    def taken(self, name: str, seen: ParsedRecord) -> BoolArray | None:
        """Which images a rejector accepts at its frozen threshold."""
        found = self.values(name, seen)
        return None if found is None else found >= self.scoring.thresholds[name]

    def accepted_errors(self, name: str, seen: ParsedRecord) -> BoolArray | None:
        """Which images are answered wrongly and accepted."""
        taken = self.taken(name, seen)
        return None if taken is None else taken & ~seen.right


def threshold_of(part: RuleCriterion, record: Record) -> float | None:
    """The threshold that an attack was bound to; None where the record does not tell."""
    at = record.metadata["thresholds"].get(show(part), part.threshold)
    return float(at) if isinstance(at, int | float) else None


def shared(one: ParsedRecord, other: ParsedRecord) -> tuple[IntArray, IntArray]:
    """The rows of the images that both records show."""
    _, ours, theirs = np.intersect1d(
        one.index, other.index, assume_unique=True, return_indices=True
    )
    return ours, theirs


def mcnemar_p_value(first: BoolArray, second: BoolArray) -> float:
    """McNemar's exact p that the first holds oftener than the second on the same images."""
    only, lost = int((first & ~second).sum()), int((second & ~first).sum())
    return float(at_least(only, only + lost, 0.5))


def too_many(odd: int, of: int) -> bool:
    """Whether a share of images is surely above what is tolerated."""
    return bool(at_least(odd, of, TOLERATED) < SURE)


def share(part: BoolArray) -> str:
    """A share in percent."""
    return f"{100 * float(part.mean()):.1f}%"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: the first three and how many more."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    *most, last = [*names[:3], *more]
    return f"{', '.join(most)} and {last}" if most else last


def has_name(record: Record) -> bool:
    """Whether the command knows the record's attack by a name, changed or not."""
    return record.label.partition(":")[0] in NAMED_ATTACKS


def changed(label: str, key: str, value: str) -> str:
    """A named attack with one more change, as the command takes it."""
    name, _, changes = label.partition(":")
    kept = [c for c in changes.split(",") if c and not re.match(rf"(\w+\.)?{key}=", c)]
    return f"{name}:{','.join([*kept, f'{key}={value}'])}"


def _seen(record: Record, among: Sequence[Record]) -> ParsedRecord:
    """A record under its label; where several bear it, with the number of images."""
    attack = _parsed(str(record.metadata["spec"]))
    several = sum(other.label == record.label for other in among) > 1
    name = f"{record.label} (n={len(record.y)})" if several else record.label
    return ParsedRecord(record, attack if isinstance(attack, Attack) else None, name)


def _parsed(text: str) -> object:
    """The spec, or None where a class or a field of it is no longer there."""
    try:
        found: object = read(text, VOCABULARY)
    except BadInput:
        return None
    return found
