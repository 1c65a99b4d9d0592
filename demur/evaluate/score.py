"""Records to rows: every rejector under every attack, in both protocols, with intervals.

paper: the TPR-95 threshold is chosen with labels on each scored set, strict >, as the paper did.
deploy: the threshold comes from clean cal images and is frozen before an attack is seen, >=.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from demur import metrics
from demur.attacks import Clean
from demur.calibrate import TPR
from demur.evaluate.as_json import plain
from demur.evaluate.attack import Evaluator
from demur.evaluate.binding import Binding
from demur.evaluate.record_scores import StoredScore, accepted, can_score, tcon_of, values
from demur.metrics import Difference, FloatArray, Interval, OperatingStats, Resamples
from demur.rejectors import Con, TooFewImages
from demur.rule import Rejector, Score
from demur.runs import Record
from demur.spec import digest, show

Protocol = Literal["paper", "deploy"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
ORACLE = "T-Con (oracle)"
BASELINE = "Con"
NO_FEATURES = "the records have no features; make them again with demur attack"
NOT_KEPT = "only the scores of some others were kept"


@dataclass(frozen=True)
class Ranking:
    """How well a score orders right before wrong, whatever the threshold."""

    auroc: float
    auroc_interval: Interval
    auroc_vs_con: Difference
    aurc: float
    eaurc: float
    augrc: float
    fpr_at_tpr: float


@dataclass(frozen=True)
class Row:
    """One rejector under one attack in one protocol."""

    attack: str
    rejector: str
    protocol: Protocol
    point: OperatingStats
    accuracy_interval: Interval
    accuracy_vs_con: Difference  # each at its own threshold, on the same images
    coverage_interval: Interval
    accepted_wrong_interval: Interval
    tpr_interval: Interval | None  # None where that share itself set the threshold
    ranking: Ranking
    threshold_from: str
    record: str
    level: float  # the TPR that was asked for

    def plain(self) -> dict[str, Any]:
        """The row as JSON values; an infinite threshold is written as text."""
        row: dict[str, Any] = plain(self)
        if not np.isfinite(self.point.threshold):
            row["point"]["threshold"] = str(self.point.threshold)
        return row


@dataclass(frozen=True)
class Summary:
    """What the classifier alone does under one attack."""

    attack: str
    spec: str
    n: int
    accuracy: float
    accuracy_interval: Interval
    ece: float
    largest_linf: float
    largest_l2: float
    record: str
    untouched: float = 0.0  # share of the images that an attack gave up on and returned clean

    @property
    def artefact(self) -> str:
        """A warning where rankings are of clean and attacked images together; else nothing."""
        if self.untouched == 0:
            return ""
        return (
            f"{self.attack} returned {100 * self.untouched:.1f}% of the images as they came, since "
            "it could not break them: TPR-95 and AUROC on such a mixture are artefacts"
        )

    def plain(self) -> dict[str, Any]:
        """The summary as JSON values."""
        summary: dict[str, Any] = plain(self)
        return summary


@dataclass(frozen=True)
class ScoredRecord:
    """One record with everything a table or a picture needs of it."""

    record: Record
    summary: Summary
    rows: list[Row]
    unseen: tuple[str, ...] = ()  # rejectors that need what this record has not


@dataclass(frozen=True)
class Scorer:
    """Fitted rejectors and frozen thresholds of a run, ready for any record of it.

    A run that held out no cal images has no thresholds, and its rows are the paper's alone.
    """

    scores: dict[str, Score]
    thresholds: dict[str, float]
    level: float
    cal_n: int
    without: dict[str, str] = field(default_factory=dict)  # rejectors that are not there, and why
    texts: dict[str, str] = field(default_factory=dict)  # of rejectors, by which scores are kept

    @staticmethod
    def of(
        evaluator: Evaluator,
        level: float = 0.95,
        rejectors: Mapping[str, Rejector] | None = None,
        records: Iterable[Record] | None = None,
    ) -> "Scorer":
        """Rejectors, those of the recipe if not said, calibrated on clean cal images.

        What has to be learned is learned if one of the records has features, else read from them.
        """
        asked = evaluator.run.recipe.rejectors() if rejectors is None else rejectors
        there = evaluator.run.records("test") if records is None else list(records)
        binding = Binding(evaluator.clean, evaluator.device)
        scores, without = _to_be_had(asked, there, binding)
        texts = {name: show(asked[name], full=True) for name in scores}
        found = Scorer(scores, {}, level, 0, without, texts)
        if "cal" not in evaluator.run.recipe.data.splits:
            return found
        cal = evaluator.clean("cal")
        usable = {name: found.of_record(name, cal) for name in scores}
        thresholds = {
            name: binding.threshold(score, TPR(level))
            for name, score in usable.items()
            if can_score(score, cal)
        }
        return replace(found, thresholds=thresholds, cal_n=len(cal.y))

    def of_record(self, name: str, record: Record) -> Score:
        """A score as it is to be had of a record: bare ones know it by its rejector's text."""
        return StoredScore(self.texts[name]) if record.scores_only else self.scores[name]

    def scored(self, record: Record, oracles: Mapping[str, FloatArray] = {}) -> ScoredRecord:
        """The record's rows, oracles last; what knows the labels has no deployable threshold."""
        base = Baseline(self, record)
        rows, unseen = list[Row](), list[str]()
        for name in self.scores:
            if not can_score(score := self.of_record(name, record), record):
                unseen.append(name)
                continue
            value = values(score, record)
            ranking = self._ranking(value, base)
            rows.append(self._paper_row(name, value, ranking, base))
            if (
                name in self.thresholds and record.metadata["split"] != "cal"
            ):  # where they come from
                rows.append(self._deploy_row(name, value, ranking, base))
        for name, value in {**oracles, ORACLE: tcon_of(record)}.items():
            rows.append(self._paper_row(name, value, self._ranking(value, base), base))
        return ScoredRecord(record, summary(record), rows, tuple(unseen))

    def _ranking(self, score: FloatArray, base: "Baseline") -> Ranking:
        correct = base.record.correct
        return Ranking(
            auroc=metrics.auroc(score, correct),
            auroc_interval=metrics.auroc_interval(score, correct),
            auroc_vs_con=metrics.auroc_difference(score, base.value, correct),
            aurc=metrics.aurc(score, correct),
            eaurc=metrics.eaurc(score, correct),
            augrc=metrics.augrc(score, correct),
            fpr_at_tpr=metrics.fpr_at_tpr(score, correct, self.level) if correct.any() else 0.0,
        )

    def _paper_row(self, name: str, score: FloatArray, ranking: Ranking, base: "Baseline") -> Row:
        record = base.record
        point = metrics.paper_stats(score, record.correct, self.level)
        # the threshold moves with the sample, so the whole procedure is redrawn
        redrawn = base.redraws.paper_accuracies(score, record.correct, self.level)
        gap = metrics.resampled_difference(
            point.accuracy - base.paper.accuracy, redrawn - base.paper_redrawn
        )
        return Row(
            record.label, name, "paper", point, metrics.percentiles(redrawn, 0.95), gap,
            point.coverage_interval, point.accepted_wrong_interval, None, ranking,
            "this set, with its labels", record.digest, self.level,
        )  # fmt: skip

    def _deploy_row(self, name: str, score: FloatArray, ranking: Ranking, base: "Baseline") -> Row:
        record = base.record
        taken = score >= self.thresholds[name]  # as the rule has it, without scoring again
        point = metrics.stats_of_verdicts(taken, record.correct, self.thresholds[name])
        kept = metrics.wilson(int(taken[record.correct].sum()), int(record.correct.sum()))
        redrawn = base.redraws.shares(record.correct, taken)
        gap = metrics.resampled_difference(
            point.accuracy - base.deploy.accuracy, redrawn - base.deploy_redrawn
        )
        return Row(
            record.label, name, "deploy", point, point.accuracy_interval, gap,
            point.coverage_interval, point.accepted_wrong_interval, kept, ranking,
            f"cal, clean, n={self.cal_n}", record.digest, self.level,
        )  # fmt: skip

    def taken(self, name: str, record: Record) -> metrics.BoolArray:
        """Which images a rejector accepts at its frozen threshold."""
        return accepted(self.of_record(name, record).rule(self.thresholds[name]), record)


def _to_be_had(
    asked: Mapping[str, Rejector], records: Sequence[Record], binding: Binding
) -> tuple[dict[str, Score], dict[str, str]]:
    """Scores that are computed or read from records, and why the others are not there."""
    featured = any(record.metadata["features"] for record in records)
    bare = bool(records) and all(record.scores_only for record in records)
    scores, without = dict[str, Score](), dict[str, str]()
    for name, rejector in asked.items():
        text = show(rejector, full=True)
        if featured or (isinstance(rejector, Score) and not bare):
            try:
                scores[name] = binding.bound(rejector)
            except TooFewImages as reason:
                without[name] = str(reason)
        elif any(text in record.kept for record in records):
            scores[name] = StoredScore(text)
        else:
            without[name] = NOT_KEPT if bare else NO_FEATURES
    return scores, without


class Baseline:
    """Confidence on one record: what every other rejector is compared with, image by image."""

    def __init__(self, scoring: Scorer, record: Record) -> None:
        self.record, correct = record, record.correct
        self.value = values(scoring.of_record(BASELINE, record), record)
        self.redraws = Resamples.of(len(correct))
        self.paper = metrics.paper_stats(self.value, correct, scoring.level)
        self.paper_redrawn = self.redraws.paper_accuracies(self.value, correct, scoring.level)
        if BASELINE in scoring.thresholds:
            taken = self.value >= scoring.thresholds[BASELINE]
            self.deploy = metrics.stats_of_verdicts(taken, correct)
            self.deploy_redrawn = self.redraws.shares(correct, taken)


def summary(record: Record) -> Summary:
    """The classifier without any rejector on one record."""
    correct = record.correct
    still = (record.arrays["size_linf"] == 0).numpy() & correct
    attacked = record.metadata["attack"] != digest(Clean())
    return Summary(
        attack=record.label,
        spec=record.metadata["spec"],
        n=len(correct),
        accuracy=metrics.accuracy(correct),
        accuracy_interval=metrics.wilson(int(correct.sum()), len(correct)),
        ece=metrics.ece(values(Con(), record).clip(0, 1), correct),
        largest_linf=float(record.arrays["size_linf"].max()),
        largest_l2=float(record.arrays["size_l2"].max()),
        record=record.digest,
        untouched=float(still.mean()) if attacked else 0.0,
    )
