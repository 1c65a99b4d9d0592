"""Scores and verdicts of a record's images, computed from its outputs or read where they are kept.

values(score, record)            # N, double
accepted(score.rule(t), record)  # N, bool
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray
from demur.output import Output, tcon
from demur.rejectors import FittedScore
from demur.rule import Rule, Score
from demur.runs import Record
from demur.spec import show

TRUE = "T-Con"  # what bare records call the true confidence, which no rejector knows


@dataclass(frozen=True)
class StoredScore(Score):
    """A score that archive records keep, since they lack what it was computed from."""

    text: str  # of the rejector

    def __call__(self, out: Output) -> Tensor:
        """Never: only a record knows."""
        raise TypeError(f"{self.text} is kept in records and cannot be computed from an output")


def values(score: Score, record: Record) -> FloatArray:
    """The score of every image of a record."""
    if isinstance(score, StoredScore) or record.scores_only:
        return _kept(record, _text(score))
    parts = [part for part, _ in score.rule(0.0).pairs]
    homes = [next(part.buffers()).device for part in parts if isinstance(part, FittedScore)]
    here = homes[0] if homes else record.y.device
    with torch.no_grad():
        found: FloatArray = score(record.output.to(here)).double().cpu().numpy()
    return found


def tcon_of(record: Record) -> FloatArray:
    """The probability of the true label of every image."""
    if record.scores_only:
        return _kept(record, TRUE)
    found: FloatArray = tcon(record.output, record.y).double().numpy()
    return found


def accepted(rule: Rule, record: Record) -> BoolArray:
    """Which images of a record are answered."""
    verdicts: BoolArray = np.all([values(score, record) >= t for score, t in rule.pairs], axis=0)
    return verdicts


def can_score(score: Score, record: Record) -> bool:
    """Whether a record holds what a score looks at."""
    if record.scores_only:
        return _text(score) in record.kept
    for part, _ in score.rule(0.0).pairs:
        if isinstance(part, StoredScore) and part.text not in record.kept:
            return False
        if isinstance(part, FittedScore) and record.output.feature.shape[-1] == 0:
            return False
    return True


def _kept(record: Record, text: str) -> FloatArray:
    if text not in record.kept:
        raise BadInput(
            f"of {record.label} the score {text} was not kept, only {', '.join(record.kept)}"
        )
    kept: FloatArray = record.kept[text].double().numpy()
    return kept


def _text(score: Score) -> str:
    """What records call a score."""
    return score.text if isinstance(score, StoredScore) else show(score, full=True)
