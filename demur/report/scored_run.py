"""The results of one run on a page: scored records, and the decisions that sentences describe."""

import json
from dataclasses import dataclass, field
from typing import Any

from demur.data import Images
from demur.errors import BadInput
from demur.evaluate import (
    BASELINE,
    LoadedRun,
    Protocol,
    RejectorEvaluation,
    Row,
    ScoredRecord,
    values,
)
from demur.evaluate.accepted_errors import ScoredWorstCase
from demur.metrics import BoolArray
from demur.runs import Record

RECTIFIED = "R-Con"
MAX_RUNS = 6  # of one page
NO_DATA = "the data set is not on this machine"


@dataclass(frozen=True)
class ScoredRun:
    """A run, its fitted rejectors and its scored records, those of worst-score apart."""

    loaded: LoadedRun
    evaluation: RejectorEvaluation
    scored: list[ScoredRecord]
    worst: list[ScoredWorstCase] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.loaded.run.name

    @property
    def protocol(self) -> Protocol:
        """Protocol of the sentences: deploy, or paper if no cal images were held out."""
        return "deploy" if self.evaluation.thresholds else "paper"

    @property
    def main_rejector(self) -> str:
        return main_rejector(self.evaluation)

    def accepted(self, scored: ScoredRecord, rejector: str) -> BoolArray:
        """Return which images a rejector accepts in the protocol of the sentences; N."""
        if self.protocol == "deploy":
            return self.evaluation.accepted(rejector, scored.record)
        score = values(self.evaluation.score_for(rejector, scored.record), scored.record)
        above: BoolArray = score > main_row(scored, rejector).point.threshold
        return above

    @property
    def training(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, one per epoch; none if there is no such file."""
        path = self.loaded.run.path / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines() if line]

    @property
    def split_sizes(self) -> dict[str, int]:
        """Number of images of each split; empty if the data set is not on this machine."""
        try:
            return {name: len(images) for name, images in self.loaded.splits.items()}
        except BadInput:
            return {}


def main_rejector(evaluation: RejectorEvaluation) -> str:
    """Return R-Con where the net has it, else Con."""
    return RECTIFIED if RECTIFIED in evaluation.scores else BASELINE


def main_row(scored: ScoredRecord, rejector: str) -> Row:
    """Return the row of a rejector at its frozen threshold, or the paper's row without one."""
    rows = [row for row in scored.rows if row.rejector == rejector]
    return next((row for row in rows if row.protocol == "deploy"), rows[0])


def hardest(records: list[ScoredRecord], evaluation: RejectorEvaluation) -> ScoredRecord:
    """Return the record with the most accepted errors of the main rejector."""
    name = main_rejector(evaluation)
    return max(records, key=lambda scored: main_row(scored, name).point.accepted_wrong)


def attacked_images(scored: ScoredRecord) -> bool:
    """Return whether any image of the record was changed."""
    return scored.summary.largest_linf > 0


def clean_images(record: Record, loaded: LoadedRun) -> Images:
    """Return the images that the record attacked; raise BadInput where the data have changed."""
    split = next(s for name, s in loaded.splits.items() if name == record.metadata["split"])
    if len(record.y) > len(split) or split.first(len(record.y)).digest() != record.metadata["data"]:
        raise BadInput(
            f"the record of {record.label} was made of other images than the data now hold; "
            "make it again with demur attack"
        )
    return split.first(len(record.y))
