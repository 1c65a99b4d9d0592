"""Decisions per image: four groups, and example images of each group by a fixed rule.

verdicts = Verdicts.of(scored[0], evaluation, "R-Con")
verdicts.counts()                       # images in each group
gallery(verdicts, loaded)            # the first images of each group, in data-set order
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import BASELINE, LoadedRun, RejectorEvaluation, ScoredRecord, values
from demur.metrics import BoolArray, FloatArray
from demur.output import prediction
from demur.report.figures import RECTIFIED, data_uri, pixel_png
from demur.runs import Record

PER_GROUP = 3


class Group(NamedTuple):
    """A combination of decision and correctness."""

    key: str
    words: str
    accepted: bool
    correct: bool


GROUPS = (
    Group("accepted-correct", "accepted, correct", True, True),
    Group("accepted-wrong", "accepted, wrong", True, False),
    Group("rejected-correct", "rejected, would have been correct", False, True),
    Group("rejected-wrong", "rejected, would have been wrong", False, False),
)


class Certainty(NamedTuple):
    """A score of one image and its threshold."""

    name: str
    value: str
    sign: str
    threshold: str
    decides: bool


class Card(NamedTuple):
    """One image before and after the attack, with the prediction and the decision."""

    place: int
    clean: str
    attacked: str
    change: str
    label: str  # names of classes
    predicted: str
    certainties: list[Certainty]
    verdict: str


class GroupCards(NamedTuple):
    """The cards of one group, and the number of its images among the stored ones."""

    group: Group
    found: int
    cards: list[Card]


class Gallery(NamedTuple):
    """The cards of one attack."""

    stored: int  # adversarial examples in the record
    factor: int  # by which the change is amplified
    groups: list[GroupCards]


@dataclass(frozen=True)
class Verdicts:
    """Decisions of one rejector at its frozen threshold on every image of a record."""

    record: Record
    evaluation: RejectorEvaluation
    rejector: str
    accepted: BoolArray
    correct: BoolArray

    @staticmethod
    def of(scored: ScoredRecord, evaluation: RejectorEvaluation, rejector: str) -> "Verdicts":
        """Return the decisions of the deploy protocol."""
        accepted = evaluation.accepted(rejector, scored.record)
        return Verdicts(scored.record, evaluation, rejector, accepted, scored.record.correct)

    def members(self, group: Group) -> BoolArray:
        """Return a mask of the images in a group."""
        decided = self.accepted if group.accepted else ~self.accepted
        return decided & (self.correct if group.correct else ~self.correct)

    def counts(self) -> dict[str, int]:
        """Return the number of images of each group by its key."""
        return {group.key: int(self.members(group).sum()) for group in GROUPS}

    def certainties(self, position: int) -> list[Certainty]:
        """Return Con, and R-Con where the net has it, of one image with their thresholds."""
        names = [name for name in (BASELINE, RECTIFIED) if name in self.evaluation.scores]
        return [self._certainty(name, position) for name in names]

    def words(self, position: int, predicted: str) -> str:
        """Return the decision on one image, with the reason of a rejection."""
        if self.accepted[position]:
            return f"accepted: {predicted}"
        at = self._certainty(self.rejector, position)
        return f"rejected: {at.name} {at.value} {at.sign} {at.threshold}"

    def _certainty(self, name: str, position: int) -> Certainty:
        value = float(values(self.evaluation.scores[name], self.record)[position])
        threshold = self.evaluation.thresholds[name]
        sign = "≥" if value >= threshold else "<"
        return Certainty(name, *_distinguishable(value, sign, threshold), name == self.rejector)


def gallery(verdicts: Verdicts, loaded: LoadedRun) -> Gallery:
    """Return the first stored images of every group, before and after the attack."""
    record = verdicts.record
    attacked = record.arrays["x_adv"].double().numpy()
    stored = len(attacked)
    clean = _clean_images(record, loaded).first(stored).batch(slice(None))[0].double().numpy()
    largest = float(record.arrays["size_linf"][:stored].max())
    factor = max(1, math.floor(0.5 / largest + 1e-6)) if largest > 0 else 1
    groups, names = [], loaded.run.recipe.data.class_names
    for group in GROUPS:
        positions = np.flatnonzero(verdicts.members(group)[:stored])
        cards = _cards(verdicts, positions[:PER_GROUP].tolist(), clean, attacked, factor, names)
        groups.append(GroupCards(group, len(positions), cards))
    return Gallery(stored, factor, groups)


def _cards(
    verdicts: Verdicts,
    positions: Sequence[int],
    clean: FloatArray,
    attacked: FloatArray,
    factor: int,
    names: Sequence[str],
) -> list[Card]:
    record, cards = verdicts.record, []
    predicted = prediction(record.output).tolist()
    for position in positions:
        change = 0.5 + factor * (attacked[position] - clean[position])
        cards.append(
            Card(
                place=int(record.arrays["index"][position]),
                clean=data_uri(pixel_png(clean[position]), "png"),
                attacked=data_uri(pixel_png(attacked[position]), "png"),
                change=data_uri(pixel_png(change), "png"),
                label=names[int(record.y[position])],
                predicted=names[predicted[position]],
                certainties=verdicts.certainties(position),
                verdict=verdicts.words(position, names[predicted[position]]),
            )
        )
    return cards


def _clean_images(record: Record, loaded: LoadedRun) -> Images:
    """Return the images that the record attacked; raise BadInput where the data have changed."""
    split = next(s for name, s in loaded.splits.items() if name == record.metadata["split"])
    if len(record.y) > len(split) or split.first(len(record.y)).digest() != record.metadata["data"]:
        raise BadInput(
            f"the record of {record.label} was made of other images than the data now hold; "
            "make it again with demur attack"
        )
    return split.first(len(record.y))


def _distinguishable(value: float, sign: str, threshold: float) -> tuple[str, str, str]:
    """Format value, sign and threshold with enough decimals to show which is larger."""
    for decimals in range(2, 9):
        left, right = f"{value:.{decimals}f}", f"{threshold:.{decimals}f}"
        if left != right:
            break
    return left, sign, right
