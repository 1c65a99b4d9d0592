"""Verdicts image by image: the four groups they fall into, and pictures of each by a fixed rule.

verdicts = Verdicts.of(scored[0], scoring, "R-Con")
verdicts.counts()                           # images in each group
gallery(verdicts, source)                   # the first images of each group, in data-set order
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import BASELINE, Evaluator, ScoredRecord, Scorer, values
from demur.metrics import BoolArray, FloatArray
from demur.output import prediction
from demur.report.figures import RECTIFIED, data_uri, pixel_png
from demur.runs import Record

PER_GROUP = 3


class Group(NamedTuple):
    """One of the four things that can happen to an image."""

    key: str
    words: str
    answered: bool
    right: bool


GROUPS = (
    Group("answered-right", "answered, right", True, True),
    Group("answered-wrong", "answered, wrong", True, False),
    Group("refused-right", "refused, would have been right", False, True),
    Group("refused-wrong", "refused, would have been wrong", False, False),
)


class Certainty(NamedTuple):
    """A score of one image beside its threshold."""

    name: str
    value: str
    sign: str
    threshold: str
    decides: bool


class Card(NamedTuple):
    """One image: what was shown, what the net said, and why it did or did not say it."""

    place: int
    clean: str
    attacked: str
    change: str
    label: int
    predicted: int
    certainties: list[Certainty]
    verdict: str


class Shown(NamedTuple):
    """The pictures of one group, and how many images it has among those that were kept."""

    group: Group
    found: int
    cards: list[Card]


class Gallery(NamedTuple):
    """The pictures of one attack."""

    kept: int
    factor: int
    groups: list[Shown]


@dataclass(frozen=True)
class Verdicts:
    """What one rejector at its frozen threshold does with every image of a record."""

    record: Record
    scoring: Scorer
    rejector: str
    answered: BoolArray
    correct: BoolArray

    @staticmethod
    def of(each: ScoredRecord, scoring: Scorer, rejector: str) -> "Verdicts":
        """The verdicts of the deploy protocol."""
        answered = scoring.taken(rejector, each.record)
        return Verdicts(each.record, scoring, rejector, answered, each.record.correct)

    def members(self, group: Group) -> BoolArray:
        """Which images are in a group."""
        answered = self.answered if group.answered else ~self.answered
        return answered & (self.correct if group.right else ~self.correct)

    def counts(self) -> dict[str, int]:
        """How many images each group has."""
        return {group.key: int(self.members(group).sum()) for group in GROUPS}

    def certainties(self, place: int) -> list[Certainty]:
        """Con, and R-Con where the net has it, of one image beside their thresholds."""
        names = [name for name in (BASELINE, RECTIFIED) if name in self.scoring.scores]
        return [self._certainty(name, place) for name in names]

    def words(self, place: int, predicted: int) -> str:
        """The verdict on one image, with the reason for a refusal."""
        if self.answered[place]:
            return f"answered {predicted}"
        at = self._certainty(self.rejector, place)
        return f"refused: {at.name} {at.value} {at.sign} {at.threshold}"

    def _certainty(self, name: str, place: int) -> Certainty:
        value = float(values(self.scoring.scores[name], self.record)[place])
        threshold = self.scoring.thresholds[name]
        sign = "≥" if value >= threshold else "<"
        return Certainty(name, *_apart(value, sign, threshold), name == self.rejector)


def gallery(verdicts: Verdicts, evaluator: Evaluator) -> Gallery:
    """The first kept images of every group, beside what they were before the attack."""
    record = verdicts.record
    attacked = record.arrays["x_adv"].double().numpy()
    kept = len(attacked)
    clean = _clean_images(record, evaluator).first(kept).batch(slice(None))[0].double().numpy()
    largest = float(record.arrays["size_linf"][:kept].max())
    factor = max(1, math.floor(0.5 / largest + 1e-6)) if largest > 0 else 1
    groups = []
    for group in GROUPS:
        places = np.flatnonzero(verdicts.members(group)[:kept])
        cards = _cards(verdicts, places[:PER_GROUP].tolist(), clean, attacked, factor)
        groups.append(Shown(group, len(places), cards))
    return Gallery(kept, factor, groups)


def _cards(
    verdicts: Verdicts,
    places: Sequence[int],
    clean: FloatArray,
    attacked: FloatArray,
    factor: int,
) -> list[Card]:
    record, cards = verdicts.record, []
    predicted = prediction(record.output).tolist()
    for place in places:
        change = 0.5 + factor * (attacked[place] - clean[place])
        cards.append(
            Card(
                place=int(record.arrays["index"][place]),
                clean=data_uri(pixel_png(clean[place]), "png"),
                attacked=data_uri(pixel_png(attacked[place]), "png"),
                change=data_uri(pixel_png(change), "png"),
                label=int(record.y[place]),
                predicted=predicted[place],
                certainties=verdicts.certainties(place),
                verdict=verdicts.words(place, predicted[place]),
            )
        )
    return cards


def _clean_images(record: Record, evaluator: Evaluator) -> Images:
    """The images the record was made of; BadInput when the data are no longer the same."""
    split = next(s for name, s in evaluator.splits.items() if name == record.metadata["split"])
    if len(record.y) > len(split) or split.first(len(record.y)).digest() != record.metadata["data"]:
        raise BadInput(
            f"the record of {record.label} was made of other images than the data now hold; "
            "make it again with demur attack"
        )
    return split.first(len(record.y))


def _apart(value: float, sign: str, threshold: float) -> tuple[str, str, str]:
    """Value, sign and threshold with as many decimals as it takes to see which is larger."""
    for decimals in range(2, 9):
        left, right = f"{value:.{decimals}f}", f"{threshold:.{decimals}f}"
        if left != right:
            break
    return left, sign, right
