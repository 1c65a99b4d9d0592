"""Scores of the images of a record, computed from its outputs or read where they are stored."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray
from demur.output import Output
from demur.rejectors import FittedScore, ImageRejector
from demur.rejectors.certainty import tcon
from demur.rejectors.image_scores import add_columns, image_rejectors, with_columns
from demur.rejectors.rule import Rule, Score
from demur.runs import Record
from demur.runs.record import TRUE
from demur.spec import show


@dataclass(frozen=True)
class StoredScore(Score):
    """A score that is read from archived records, which lack the features to compute it."""

    text: str  # full spec of the rejector

    def __call__(self, out: Output) -> Tensor:
        raise TypeError(f"{self.text} is stored in records; it cannot be computed from an output")


def values(score: Score, record: Record) -> FloatArray:
    """Score of every image of a record; N. BadInput if the record does not contain it."""
    if isinstance(score, StoredScore) or record.scores_only:
        return _stored(record, _text(score))
    score, rejectors = with_columns(score)
    columns = [torch.from_numpy(_stored(record, rejector.key)) for rejector in rejectors]
    fitted = (part for part, _ in score.rule(0.0).pairs if isinstance(part, FittedScore))
    device = next((next(part.buffers()).device for part in fitted), record.y.device)
    with torch.no_grad():
        out = add_columns(record.output, columns).to(device)
        return np.asarray(score(out).double().cpu().numpy())


def tcon_of(record: Record) -> FloatArray:
    """T-Con of every image: the probability of its true label; N."""
    if record.scores_only:
        return _stored(record, TRUE)
    return np.asarray(tcon(record.output, record.y).double().numpy())


def has_tcon(record: Record) -> bool:
    """Whether a record has T-Con; scores-only records of corruptions do not."""
    return not record.scores_only or TRUE in record.stored_scores


def accepted(rule: Rule, record: Record) -> BoolArray:
    """Which images of a record the rule accepts; N."""
    return np.asarray(np.all([values(score, record) >= t for score, t in rule.pairs], axis=0))


def can_score(score: Score, record: Record) -> bool:
    """Whether a record contains the outputs, features or stored scores that a score needs."""
    if record.scores_only:
        return _text(score) in record.stored_scores
    for part, _ in score.rule(0.0).pairs:
        if isinstance(part, StoredScore) and part.text not in record.stored_scores:
            return False
        if isinstance(part, FittedScore) and record.output.feature.shape[-1] == 0:
            return False
    return all(one.key in record.stored_scores for one in image_rejectors(score))


def _stored(record: Record, text: str) -> FloatArray:
    if text not in record.stored_scores:
        raise BadInput(
            f"the record of {record.label} does not contain the score {text}, only "
            f"{', '.join(record.stored_scores)}; attack the run again where the weights are"
        )
    return np.asarray(record.stored_scores[text].double().numpy())


def _text(score: Score) -> str:
    """Name of a score in records: the full spec of its rejector."""
    if isinstance(score, ImageRejector):
        return score.key
    return score.text if isinstance(score, StoredScore) else show(score, full=True)


def to_json(value: Any) -> Any:
    """Convert dataclasses and named tuples to dictionaries, recursively."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


class JsonFields:
    """Base of dataclasses that are written to JSON."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = to_json(self)
        return found
