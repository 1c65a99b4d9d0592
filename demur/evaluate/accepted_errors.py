"""Accepted errors of the attacked rejector at every threshold, from worst-score records.

A worst-score record mixes wrong predictions of the highest score with clean images on which none
was found, so that TPR and AUROC of the mixture mean nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from demur.attacks import Clean
from demur.calibrate import TPR
from demur.errors import BadInput
from demur.evaluate.record_scores import JsonFields, can_score, values
from demur.evaluate.recording import LoadedRun
from demur.evaluate.score import BASELINE, RejectorEvaluation
from demur.metrics import BoolArray, Difference, FloatArray, Interval, WorstCase
from demur.progress import ignore
from demur.rejectors.image_scores import image_rejectors
from demur.rejectors.rule import Rejector, Score
from demur.runs import Record
from demur.runs.record import attack_of
from demur.spec import Spec, digest, show
from demur.spec.code_digest import score_key

LEVELS = (0.95, 0.9, 0.8, 0.6)  # TPR on clean images


class AcceptedErrors(NamedTuple):
    """Share of all images with an accepted error at one threshold, with its Wilson interval."""

    tpr: float
    threshold: float
    share: float
    lo: float
    hi: float


@dataclass(frozen=True)
class WorstCaseRow(JsonFields):
    """Accepted errors of one rejector under a worst-score attack on it; intervals are 95%."""

    attack: str
    rejector: str
    n: int
    points: tuple[AcceptedErrors, ...]
    threshold_from: str
    augrc: float
    augrc_interval: Interval
    aurc: float
    aurc_interval: Interval
    augrc_vs_con: Difference | None = None  # None without a worst-score record of Con
    record: str = ""

    def shares(self) -> list[tuple[float, Interval]]:
        """Accepted errors at each level, AUGRC and AURC, with their intervals."""
        points = [(point.share, Interval(*point[-2:])) for point in self.points]
        return [*points, (self.augrc, self.augrc_interval), (self.aurc, self.aurc_interval)]

    @property
    def sentence(self) -> str:
        """AUGRC and AURC with intervals, and where the thresholds come from."""
        areas = zip(("AUGRC", "AURC"), self.shares()[-2:], strict=True)
        shown = ", ".join(f"{name} {v:.1%} [{lo:.1%}, {hi:.1%}]" for name, (v, (lo, hi)) in areas)
        return f"{self.rejector}: {shown}; thresholds by TPR on {self.threshold_from}"

    @staticmethod
    def of(
        case: WorstCase, name: str, scores: FloatArray, correct: BoolArray, origin: str
    ) -> "WorstCaseRow":
        """Figures of a worst case, with thresholds from scores and correctness of clean images."""
        thresholds = [TPR(level).threshold(scores, correct) for level in LEVELS]
        points = tuple(
            AcceptedErrors(level, t, case.accepted_errors(t), *case.interval(t))
            for level, t in zip(LEVELS, thresholds, strict=True)
        )
        return WorstCaseRow(
            "worst-score", name, len(case.worst), points, f"{origin}, n={len(scores)}",
            case.augrc, case.augrc_interval(), case.aurc, case.aurc_interval(),
        )  # fmt: skip


class ScoredWorstCase(NamedTuple):
    """A worst-score record with its figures; `unattacked` counts errors on clean images."""

    record: Record
    row: WorstCaseRow
    case: WorstCase
    unattacked: WorstCase


def aimed_rejector(record: Record) -> str:
    """Key of the score that a worst-score record attacks, of the code then; else empty."""
    text = str(record.metadata["spec"])
    found = attack_of(text) if text.startswith("WorstScore(") else None
    rejector = getattr(found, "rejector", None)
    code = record.metadata.get("user_code", {})
    return score_key(rejector, code) if isinstance(rejector, Spec) else ""


def under_attack(
    rejector: Rejector, score: Score, attacked: Record, clean: Record
) -> dict[str, Any]:
    """Arguments of `certify_threshold` for a worst-score record that attacks this rejector."""
    if aimed_rejector(attacked) != score_key(rejector):
        text = show(rejector, full=True)
        raise BadInput(f"{attacked.label} is no worst-score attack on {text}; use worst-score")
    under = show(attack_of(str(attacked.metadata["spec"])))
    return {"worst": worst_case_of(score, attacked, clean).worst, "under": under}


def worst_case_of(score: Score, record: Record, clean: Record) -> WorstCase:
    """Worst case of a score from a worst-score record and the clean scores of its images."""
    if record.metadata.get("probe", {}).get("random_outputs"):
        raise BadInput("the net is randomised, and worst-score compares scores of single passes")
    right = clean.correct[: len(record.y)]
    before = values(score, clean)[: len(record.y)]
    worst = np.where(record.correct, -np.inf, values(score, record))
    # another batch size may round the score of a wrong clean image to a higher value
    return WorstCase.of(before, np.where(right, worst, np.maximum(worst, before)))


def clean_of(record: Record, records: Sequence[Record]) -> Record | None:
    """A clean record of the images of another record, the largest; None if there is none."""
    index = record.arrays["index"]
    clean = [one for one in records if one.metadata["attack"] == digest(Clean())]
    same = [one for one in clean if torch.equal(one.arrays["index"][: len(index)], index)]
    return max(same, key=lambda one: len(one.y), default=None)


def worst_cases(
    evaluation: RejectorEvaluation, loaded: LoadedRun, records: Sequence[Record],
    on_message: Callable[[str], None] = ignore,
) -> list[ScoredWorstCase]:  # fmt: skip
    """Figures of the worst-score records among `records`, of one split, Con last.

    Thresholds come from clean cal images, or from the clean record of these images if the run has
    none. `on_message` is told why a record has no figures.
    """
    found, con = list[ScoredWorstCase](), dict[str, WorstCase]()
    aims = [(record, aimed_rejector(record)) for record in records]
    for record, text in sorted(aims, key=lambda aim: aim[1] == evaluation.texts.get(BASELINE)):
        try:
            found += [_scored(evaluation, loaded, record, text, records)] if text else []
        except BadInput as reason:
            on_message(f"{record.label} (n={len(record.y)}) without figures: {reason}")
    for entry in found[::-1]:  # the first one of the same images counts
        if entry.row.rejector == BASELINE:
            con[entry.record.metadata["data"]] = entry.case
    for at, entry in enumerate(found):
        other = con.get(entry.record.metadata["data"])
        if other is not None and entry.row.rejector != BASELINE:
            gap = entry.case.augrc_difference(other)
            found[at] = entry._replace(row=replace(entry.row, augrc_vs_con=gap))
    return found


def _scored(
    evaluation: RejectorEvaluation, loaded: LoadedRun, record: Record, text: str,
    records: Sequence[Record],
) -> ScoredWorstCase:  # fmt: skip
    name = next((name for name, known in evaluation.texts.items() if known == text), None)
    own = image_rejectors(evaluation.scores.get(name or ""))
    record = loaded.with_scores(record, own)
    if name is None or not can_score(evaluation.score_for(name, record), record):
        raise BadInput(f"{text.partition(' #')[0]} is not scored here; name it with --rejector")
    split, clean = record.metadata["split"], clean_of(record, records)
    if clean is None:
        make = f"demur attack {loaded.run.name} clean --split {split}"
        raise BadInput(f"there is no clean record of its images; {make} makes it")
    clean = loaded.with_scores(clean, own)
    case = worst_case_of(evaluation.score_for(name, record), record, clean)
    has_cal = name in evaluation.thresholds and split != "cal"
    chosen_on = loaded.clean("cal", *own) if has_cal else clean
    scores = values(evaluation.score_for(name, chosen_on), chosen_on)
    origin = f"{'held-out cal' if has_cal else split} images, clean"
    row = WorstCaseRow.of(case, name, scores, chosen_on.correct, origin)
    row = replace(row, attack=record.label, record=record.digest)
    wrong = np.where(clean.correct[: len(record.y)], -np.inf, case.clean)
    return ScoredWorstCase(record, row, case, WorstCase.of(case.clean, wrong))
