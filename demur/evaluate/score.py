"""Records to rows: every rejector under every attack, in both protocols, with intervals.

paper: the TPR-95 threshold is chosen with labels on each scored set, strict >, as the paper did.
deploy: the threshold comes from clean cal images and is frozen before an attack is seen, >=.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args

import numpy as np

from demur import metrics
from demur.calibrate import TPR
from demur.evaluate.attack import Source
from demur.evaluate.binding import Binding
from demur.metrics import Difference, FloatArray, Interval, Operating
from demur.output import con, tcon
from demur.rule import Score
from demur.runs import Record

Protocol = Literal["paper", "deploy"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
ORACLE = "T-Con (oracle)"
BASELINE = "Con"
RESAMPLES = 500


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
    point: Operating
    accuracy_interval: Interval
    coverage_interval: Interval
    accepted_wrong_interval: Interval
    tpr_interval: Interval | None  # None where that share itself set the threshold
    ranking: Ranking
    threshold_from: str
    record: str

    def plain(self) -> dict[str, Any]:
        """The row as JSON values; an infinite threshold is written as text."""
        row: dict[str, Any] = _plain(self)
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

    def plain(self) -> dict[str, Any]:
        """The summary as JSON values."""
        summary: dict[str, Any] = _plain(self)
        return summary


@dataclass(frozen=True)
class Scored:
    """One record with everything a table or a picture needs of it."""

    record: Record
    summary: Summary
    rows: list[Row]


@dataclass(frozen=True)
class Scoring:
    """Fitted rejectors and frozen thresholds of a run, ready for any record of it.

    A run that held out no cal images has no thresholds, and its rows are the paper's alone.
    """

    scores: dict[str, Score]
    thresholds: dict[str, float]
    level: float
    cal_n: int

    @staticmethod
    def of(source: Source, level: float = 0.95) -> "Scoring":
        """Every rejector that the run's recipe names, calibrated on clean cal images."""
        binding, rejectors = Binding(source.clean), source.run.recipe.rejectors()
        scores: dict[str, Score] = {name: binding.bound(r) for name, r in rejectors.items()}
        if "cal" not in source.run.recipe.data.splits:
            return Scoring(scores, {}, level, 0)
        cal = source.clean("cal")
        at = TPR(level)
        thresholds = {name: binding.threshold(score, at) for name, score in scores.items()}
        return Scoring(scores, thresholds, level, len(cal.y))

    def scored(self, record: Record) -> Scored:
        """The record's rows, oracle last; the oracle has no deployable threshold."""
        base = values(self.scores[BASELINE], record)
        rows = []
        for name, score in self.scores.items():
            value = values(score, record)
            ranking = self._ranking(value, base, record)
            rows.append(self._paper_row(name, value, ranking, record))
            if name in self.thresholds:
                rows.append(self._deploy_row(name, ranking, record))
        oracle = tcon(record.output, record.y).double().numpy()
        ranking = self._ranking(oracle, base, record)
        rows.append(self._paper_row(ORACLE, oracle, ranking, record))
        return Scored(record, summary(record), rows)

    def _ranking(self, score: FloatArray, base: FloatArray, record: Record) -> Ranking:
        correct = record.correct
        return Ranking(
            auroc=metrics.auroc(score, correct),
            auroc_interval=metrics.bootstrap(
                metrics.auroc, score, correct, within=correct, resamples=RESAMPLES
            ),
            auroc_vs_con=metrics.paired_difference(
                metrics.auroc, score, base, correct, within=correct, resamples=RESAMPLES
            ),
            aurc=metrics.aurc(score, correct),
            eaurc=metrics.eaurc(score, correct),
            augrc=metrics.augrc(score, correct),
            fpr_at_tpr=metrics.fpr_at_tpr(score, correct, self.level) if correct.any() else 0.0,
        )

    def _paper_row(self, name: str, score: FloatArray, ranking: Ranking, record: Record) -> Row:
        point = metrics.paper_operating_point(score, record.correct, self.level)
        # the threshold moves with the sample, so the whole procedure is resampled
        interval = metrics.bootstrap(
            lambda s, c: metrics.paper_operating_point(s, c, self.level).accuracy,
            score,
            record.correct,
            resamples=RESAMPLES,
        )
        return Row(
            record.label, name, "paper", point, interval, point.coverage_interval,
            point.accepted_wrong_interval, None, ranking, "this set, with its labels",
            record.digest,
        )  # fmt: skip

    def _deploy_row(self, name: str, ranking: Ranking, record: Record) -> Row:
        rule = self.scores[name].rule(self.thresholds[name])
        accepted = rule.accepted(record.output).numpy()
        point = metrics.verdict_point(accepted, record.correct, self.thresholds[name])
        kept = metrics.wilson(int(accepted[record.correct].sum()), int(record.correct.sum()))
        return Row(
            record.label, name, "deploy", point, point.accuracy_interval, point.coverage_interval,
            point.accepted_wrong_interval, kept, ranking, f"cal, clean, n={self.cal_n}",
            record.digest,
        )  # fmt: skip


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as dictionaries, all the way down."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value._asdict() if hasattr(value, "_asdict") else value


def values(score: Score, record: Record) -> FloatArray:
    """The score of every image of a record."""
    return score(record.output).double().numpy()


def summary(record: Record) -> Summary:
    """The classifier without any rejector on one record."""
    correct = record.correct
    confidence = con(record.output).double().numpy().clip(0, 1)
    return Summary(
        attack=record.label,
        spec=record.about["spec"],
        n=len(correct),
        accuracy=metrics.accuracy(correct),
        accuracy_interval=metrics.wilson(int(correct.sum()), len(correct)),
        ece=metrics.ece(confidence, correct),
        largest_linf=float(record.arrays["size_linf"].max()),
        largest_l2=float(record.arrays["size_l2"].max()),
        record=record.digest,
    )
