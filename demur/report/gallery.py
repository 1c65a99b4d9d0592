"""Decisions per image: four groups, and example images of each group by a fixed rule.

verdicts = Verdicts.of(results, results.scored[0])
verdicts.counts()                       # images in each group
gallery(verdicts)                       # the first images of each group, in data-set order
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from demur.evaluate import BASELINE, ScoredRecord, values
from demur.metrics import BoolArray, FloatArray
from demur.output import prediction
from demur.report.figures import data_uri, pixel_png
from demur.report.scored_run import RECTIFIED, ScoredRun, clean_images
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
    """Decisions of the main rejector on every image of a record."""

    results: ScoredRun
    scored: ScoredRecord
    accepted: BoolArray
    correct: BoolArray

    @staticmethod
    def of(results: ScoredRun, scored: ScoredRecord) -> "Verdicts":
        """Return the decisions at the frozen threshold, or at the paper's without cal images."""
        accepted = results.accepted(scored, results.main_rejector)
        return Verdicts(results, scored, accepted, scored.record.correct)

    @property
    def record(self) -> Record:
        """The record."""
        return self.scored.record

    def members(self, group: Group) -> BoolArray:
        """Return a mask of the images in a group."""
        decided = self.accepted if group.accepted else ~self.accepted
        return decided & (self.correct if group.correct else ~self.correct)

    def counts(self) -> dict[str, int]:
        """Return the number of images of each group by its key."""
        return {group.key: int(self.members(group).sum()) for group in GROUPS}

    def certainties(self, position: int) -> list[Certainty]:
        """Return Con, and R-Con where the net has it, of one image with their thresholds."""
        scores = self.results.evaluation.scores
        names = [name for name in (BASELINE, RECTIFIED) if name in scores]
        return [self._certainty(name, position) for name in names]

    def words(self, position: int, predicted: str) -> str:
        """Return the decision on one image, with the reason of a rejection."""
        if self.accepted[position]:
            return f"accepted: {predicted}"
        at = self._certainty(self.results.main_rejector, position)
        return f"rejected: {at.name} {at.value} {at.sign} {at.threshold}"

    def _certainty(self, name: str, position: int) -> Certainty:
        score = self.results.evaluation.score_for(name, self.record)
        value = float(values(score, self.record)[position])
        row = self.results.row(self.scored, name)
        threshold, strict = row.point.threshold, row.protocol == "paper"
        above = value > threshold if strict else value >= threshold
        sign = (">" if strict else "≥") if above else ("≤" if strict else "<")
        decides = name == self.results.main_rejector
        return Certainty(name, *_distinguishable(value, sign, threshold), decides)


def gallery(verdicts: Verdicts) -> Gallery:
    """Return the first stored images of every group, before and after the attack."""
    record = verdicts.record
    attacked = record.arrays["x_adv"].double().numpy()
    stored = len(attacked)
    images = clean_images(record, verdicts.results.loaded).first(stored)
    clean = images.batch(slice(None))[0].double().numpy()
    largest = float(record.arrays["size_linf"][:stored].max())
    factor = max(1, math.floor(0.5 / largest + 1e-6)) if largest > 0 else 1
    groups, names = [], verdicts.results.loaded.run.recipe.data.class_names
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


def _distinguishable(value: float, sign: str, threshold: float) -> tuple[str, str, str]:
    """Format value, sign and threshold with enough decimals to show which is larger."""
    for decimals in range(2, 9):
        left, right = f"{value:.{decimals}f}", f"{threshold:.{decimals}f}"
        if left != right:
            break
    return left, sign, right
