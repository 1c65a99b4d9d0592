"""Score records: a row for every rejector under every attack, in two protocols, with intervals.

paper: the threshold is chosen on the scored images with their labels, and a score must be above it.
deploy: the threshold is chosen on clean cal images before any attack, and a score must reach it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from demur import metrics
from demur.attacks import Clean
from demur.calibrate import TPR, binomial_sf
from demur.errors import BadInput
from demur.evaluate.binding import ThresholdResolver
from demur.evaluate.record_scores import (
    JsonFields,
    StoredScore,
    accepted,
    can_score,
    has_tcon,
    tcon_of,
    values,
)
from demur.evaluate.recording import LoadedRun
from demur.metrics import Difference, FloatArray, Interval, OperatingStats, Resamples
from demur.output import label_entry, log_probabilities, mask_label
from demur.recipes import AnyName, rejectors_named
from demur.rejectors import Con, TooFewImages
from demur.rejectors.image_scores import image_rejectors
from demur.rejectors.rule import Rejector, Score
from demur.runs import Record
from demur.runs.record import code_problem, is_corruption
from demur.spec import digest
from demur.spec.code_digest import score_key

Protocol = Literal["paper", "deploy"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
ORACLE = "T-Con (oracle)"
BASELINE = "Con"
NO_FEATURES = "the records have no features; make them again with demur attack"
NOT_KEPT = "only the scores of some others were kept"
BOUNDARY = 0.05  # difference of two class probabilities below which an image is at the boundary
# An attack that goes on after a success leaves about as many wrong images just past the boundary
# as correct ones just before it: 0.9 to 1.3 times in the stored records of PGD that keep logits.
# More than twice as many, at this significance, show one that stops.
BOUNDARY_SHARE, BOUNDARY_SIGNIFICANCE = 2 / 3, 0.01


@dataclass(frozen=True)
class Ranking:
    """How well a score separates correct from wrong predictions, over all thresholds."""

    auroc: float
    auroc_interval: Interval
    auroc_vs_con: Difference
    aurc: float
    eaurc: float
    augrc: float
    fpr_at_tpr: float


@dataclass(frozen=True)
class Row(JsonFields):
    """Results of one rejector under one attack in one protocol; intervals are 95%."""

    attack: str
    rejector: str
    protocol: Protocol
    point: OperatingStats
    accuracy_interval: Interval
    accuracy_vs_con: Difference  # both at their own thresholds, on the same images
    coverage_interval: Interval
    accepted_wrong_interval: Interval
    tpr_interval: Interval | None  # None if the TPR set the threshold, as in the paper protocol
    ranking: Ranking
    threshold_from: str
    record: str
    level: float  # TPR at which the threshold was chosen

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values; an infinite threshold becomes text."""
        row = super().to_json()
        if not np.isfinite(self.point.threshold):
            row["point"]["threshold"] = str(self.point.threshold)
        return row


@dataclass(frozen=True)
class Summary(JsonFields):
    """Results of the classifier without a rejector under one attack."""

    attack: str
    spec: str
    n: int
    accuracy: float
    accuracy_interval: Interval
    ece: float
    largest_linf: float
    largest_l2: float
    record: str
    untouched: float = 0.0  # share of images that the attack returned unchanged and correct
    just_past: int = 0  # wrong predictions at the decision boundary
    just_before: int = 0  # correct predictions at the decision boundary

    @property
    def artefact(self) -> str:
        """Warning if rankings of these images say little about a rejector; otherwise empty.

        Either the images are a mixture of clean and adversarial ones, or the attack stopped at
        the first success, where every rejector finds it easy to tell wrong from correct.
        """
        if self.untouched > 0:
            return (
                f"{self.attack} returned {100 * self.untouched:.1f}% of the images unchanged, "
                "since it could not break them: TPR-95 and AUROC on such a mixture are artefacts"
            )
        near = self.just_past + self.just_before
        if not near or binomial_sf(self.just_past, near, BOUNDARY_SHARE) > BOUNDARY_SIGNIFICANCE:
            return ""
        return (
            f"{self.attack} left {self.just_past} wrong images just past the decision boundary and "
            f"{self.just_before} correct ones just before it: it stops at the first success, so "
            "TPR-95 and AUROC flatter every rejector; use keep=max_objective for them"
        )


@dataclass(frozen=True)
class ScoredRecord:
    """A record with its summary and rows, for tables and figures."""

    record: Record
    summary: Summary
    rows: list[Row]
    missing_rejectors: tuple[str, ...] = ()  # rejectors that need arrays which this record lacks


@dataclass(frozen=True)
class RejectorEvaluation:
    """Fitted rejectors of a run with their thresholds; scores any record of the run.

    Without cal images there are no thresholds, and only the paper protocol has rows.

    Attributes:
        scores: Fitted scores by the name of their rejector.
        thresholds: Thresholds of the deploy protocol, by name.
        level: TPR at which thresholds are chosen.
        cal_n: Number of cal images that thresholds were chosen on.
        unavailable: Reasons why rejectors are missing, by name.
        texts: Full specs of the rejectors, by name; stored scores are found by them.
        loaded: The run, whose net image rejectors query.

    Example:
        >>> loaded = LoadedRun(Run.open("digits-pgdat-rr"), "cpu")
        >>> evaluation = RejectorEvaluation.of(loaded)
        >>> record = loaded.run.records("test")[0]
        >>> aurocs = {
        ...     row.rejector: row.ranking.auroc for row in evaluation.score_record(record).rows
        ... }
    """

    scores: dict[str, Score]
    thresholds: dict[str, float]
    level: float
    cal_n: int
    unavailable: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    loaded: LoadedRun | None = field(default=None, repr=False)

    @staticmethod
    def of(
        loaded: LoadedRun,
        level: float = 0.95,
        rejectors: Mapping[str, Rejector] | Iterable[AnyName] | None = None,
        records: Iterable[Record] | None = None,
    ) -> "RejectorEvaluation":
        """Fit the rejectors of a run and choose their thresholds, at a TPR, on clean cal images.

        A list of rejectors (classes, instances or texts such as "myrej:Gini(power=2)") is added to
        those of the recipe; a mapping replaces them. They are fitted if one of the records to score
        (None takes the test split) has features; otherwise their stored scores are read.
        """
        recipe = loaded.run.recipe
        if not isinstance(rejectors, Mapping):
            rejectors = recipe.rejectors() | rejectors_named(rejectors or (), recipe)
        specs = {name: loaded.fitted(spec) for name, spec in rejectors.items()}
        to_score = loaded.usable_records("test") if records is None else list(records)
        binding = ThresholdResolver(loaded.clean, loaded.device)
        scores, unavailable = _fit_or_read(specs, to_score, binding)
        texts = {name: score_key(specs[name]) for name in scores}
        evaluation = RejectorEvaluation(scores, {}, level, 0, unavailable, texts, loaded)
        if "cal" not in loaded.run.recipe.data.splits:
            return evaluation
        cal = loaded.clean("cal", *image_rejectors(tuple(specs.values())))
        cal_scores = {name: evaluation.score_for(name, cal) for name in scores}
        thresholds = {
            name: binding.choose_threshold(score, TPR(level))
            for name, score in cal_scores.items()
            if can_score(score, cal)
        }
        return replace(evaluation, thresholds=thresholds, cal_n=len(cal.y))

    def score_for(self, name: str, record: Record) -> Score:
        """Score of a rejector for a record: computed, or read if the record is scores-only."""
        return StoredScore(self.texts[name]) if record.scores_only else self.scores[name]

    def score_record(self, record: Record, oracles: Mapping[str, FloatArray] = {}) -> ScoredRecord:
        """Score a record with every rejector; oracles come last.

        `oracles` are scores (N each) by name that use the labels; they get paper rows only.
        BadInput is raised if the record lacks confidence, which other scores are compared with, or
        is of another model than the thresholds, or its attack of other code of the user's.
        """
        if problem := code_problem(record):
            raise BadInput(f"the record of {record.label} cannot be scored: {problem}")
        if self.loaded is not None:
            if record.metadata.get("model") != self.loaded.model_key:
                raise BadInput(
                    f"the record of {record.label} was made with another model than these "
                    "thresholds: the net was wrapped or changed since; attack it again"
                )
            record = self.loaded.with_scores(record, image_rejectors(tuple(self.scores.values())))
        con = values(self.score_for(BASELINE, record), record)
        scores = {name: self.score_for(name, record) for name in self.scores}
        found = {name: values(s, record) for name, s in scores.items() if can_score(s, record)}
        known = {ORACLE: tcon_of(record)} if has_tcon(record) else {}
        base, rows = Baseline(self, record, con, found, {**oracles, **known}), list[Row]()
        for name, value in found.items():
            ranking = self._ranking(value, base)
            rows.append(self._paper_row(name, value, ranking, base))
            if name in base.accepts:
                rows.append(self._deploy_row(name, ranking, base))
        for name, value in {**oracles, **known}.items():
            rows.append(self._paper_row(name, value, self._ranking(value, base), base))
        missing_rejectors = tuple(name for name in scores if name not in found)
        return ScoredRecord(record, summary(record), rows, missing_rejectors)

    def _ranking(self, score: FloatArray, base: "Baseline") -> Ranking:
        correct = base.correct
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
        point = metrics.paper_stats(score, base.correct, self.level)
        # the threshold depends on the sample, so each resample chooses its own
        drawn = base.drawn[name, "paper"]
        change = drawn - base.drawn[BASELINE, "paper"]
        gap = metrics.resampled_difference(point.accuracy - base.paper.accuracy, change)
        return Row(
            record.label, name, "paper", point, metrics.percentiles(drawn, 0.95), gap,
            point.coverage_interval, point.accepted_wrong_interval, None, ranking,
            "this set, with its labels", record.digest, self.level,
        )  # fmt: skip

    def _deploy_row(self, name: str, ranking: Ranking, base: "Baseline") -> Row:
        record, accept, correct = base.record, base.accepts[name], base.correct
        point = metrics.stats_of_verdicts(accept, correct, self.thresholds[name])
        tpr = metrics.wilson(int(accept[correct].sum()), int(correct.sum()))
        gap = metrics.resampled_difference(
            point.accuracy - metrics.stats_of_verdicts(base.accepts[BASELINE], correct).accuracy,
            base.drawn[name, "deploy"] - base.drawn[BASELINE, "deploy"],
        )
        return Row(
            record.label, name, "deploy", point, point.accuracy_interval, gap,
            point.coverage_interval, point.accepted_wrong_interval, tpr, ranking,
            f"cal, clean, n={self.cal_n}", record.digest, self.level,
        )  # fmt: skip

    def accepted(self, name: str, record: Record) -> metrics.BoolArray:
        """Which images a rejector accepts at its threshold; N."""
        return accepted(self.score_for(name, record).rule(self.thresholds[name]), record)


def _fit_or_read(
    rejectors: Mapping[str, Rejector], records: Sequence[Record], binding: ThresholdResolver
) -> tuple[dict[str, Score], dict[str, str]]:
    """Scores that can be computed or read from records, and why the others are missing."""
    with_features = any(record.metadata["features"] for record in records)
    scores_only = bool(records) and all(record.scores_only for record in records)
    scores, unavailable = dict[str, Score](), dict[str, str]()
    for name, rejector in rejectors.items():
        text = score_key(rejector)
        if with_features or (isinstance(rejector, Score) and not scores_only):
            try:
                scores[name] = binding.bound(rejector)
            except TooFewImages as reason:
                unavailable[name] = str(reason)
        elif any(text in record.stored_scores for record in records):
            scores[name] = StoredScore(text)
        else:
            unavailable[name] = NOT_KEPT if scores_only else NO_FEATURES
    return scores, unavailable


class Baseline:
    """Confidence on one record, which every other rejector is compared with on the same images.

    `accepts` holds the verdicts (N each) of the deploy protocol, none of cal images, on which the
    thresholds were chosen; `drawn` the accuracies on all resamples.
    """

    def __init__(
        self, evaluation: RejectorEvaluation, record: Record, con: FloatArray,
        found: Mapping[str, FloatArray], oracles: Mapping[str, FloatArray],
    ) -> None:  # fmt: skip
        self.record, self.correct, self.value = record, record.correct, con
        level, known = evaluation.level, evaluation.thresholds
        deployed = [name for name in known if name in found and record.metadata["split"] != "cal"]
        self.accepts = {name: found[name] >= known[name] for name in deployed}
        self.paper = metrics.paper_stats(con, self.correct, level)
        drawn: dict[tuple[str, Protocol], metrics.Statistic] = {}
        for name, column in {**found, **oracles}.items():
            drawn[name, "paper"] = metrics.paper_accuracy(column, self.correct, level)
        for name, accept in self.accepts.items():
            drawn[name, "deploy"] = partial(Resamples.shares, part=self.correct, whole=accept)
        values = metrics.resampled(len(self.correct), [*drawn.values()])
        self.drawn = dict(zip(drawn, values, strict=True))


def summary(record: Record) -> Summary:
    """Results of the classifier without a rejector on one record."""
    correct = record.correct
    attacked = record.metadata["attack"] != digest(Clean()) and not is_corruption(record.metadata)
    just_past, just_before = boundary_counts(record) if attacked else (0, 0)
    size = "size_linf" if "size_linf" in record.arrays else "size_l2"  # scores-only: its own norm
    untouched = correct & (record.arrays[size] == 0).numpy() if attacked else np.zeros(1)
    largest = {  # a scores-only record may have a norm in its metadata alone
        f"largest_{norm}": float(record.arrays[f"size_{norm}"].max())
        if f"size_{norm}" in record.arrays
        else float(record.metadata.get(f"largest_{norm}", 0.0))
        for norm in ("linf", "l2")
    }
    return Summary(
        attack=record.label,
        spec=record.metadata["spec"],
        n=len(correct),
        accuracy=metrics.accuracy(correct),
        accuracy_interval=metrics.wilson(int(correct.sum()), len(correct)),
        ece=metrics.ece(values(Con(), record).clip(0, 1), correct),
        **largest,
        record=record.digest,
        untouched=float(untouched.mean()),
        just_past=just_past,
        just_before=just_before,
    )


def boundary_counts(record: Record) -> tuple[int, int]:
    """Wrong and correct predictions where the true and the best wrong class are nearly equal.

    A scores-only record has them in its metadata; without them both are 0.
    """
    if record.scores_only:
        return record.metadata.get("just_past", 0), record.metadata.get("just_before", 0)
    p = log_probabilities(record.output).exp()
    gap = label_entry(p, record.y) - mask_label(p, record.y).amax(-1)
    near, correct = (gap.abs() < BOUNDARY).numpy(), record.correct
    return int((near & ~correct).sum()), int((near & correct).sum())
