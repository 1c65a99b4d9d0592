"""How much is there to gain? Probes that learn which of a net's answers were right.

    told = probed(record)           # {"answers, linear (oracle)": N scores, ...}

They are fitted by the labels of the very record they are scored on, which nobody has. Images are
dealt into folds, and each is scored by a fit to the others, so that no image tells of itself. What
they find is there; what they do not find may still be, for another fit or for more images.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import one_hot

from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray
from demur.output import Output, log_probabilities, prediction
from demur.runs import Record

FOLDS = 5
LEAST = 100  # right answers, and wrong ones, below which nothing is fitted
LINEAR, TREES = "answers, linear (oracle)", "answers, trees (oracle)"
FEATURES = "features, linear (oracle)"  # and answers
PROBES = (LINEAR, TREES, FEATURES)


def probe_scores(record: Record) -> dict[str, FloatArray]:
    """The score of every image by each probe that the record has something for."""
    if reason := why_unprobed(record):
        raise BadInput(f"the record of {record.label} cannot be probed: {reason}")
    out = record.output
    answers = _answers(out)
    found = {
        LINEAR: _cross_fitted(_line, answers, record.correct),
        TREES: _cross_fitted(_trees, answers, record.correct),
    }
    if out.feature.shape[-1]:
        both = np.concatenate([answers, out.feature.double().numpy()], 1)
        found[FEATURES] = _cross_fitted(_line, both, record.correct)
    return found


def why_unprobed(record: Record) -> str:
    """Why nothing can be learned from a record; nothing where something can."""
    if record.scores_only:
        return "only scores were kept; attack the run again, and archive it without --only"
    right = int(record.correct.sum())
    if min(right, len(record.y) - right) < LEAST:
        return (
            f"{right} of {len(record.y)} answers are right, and to learn what makes them so takes "
            f"{LEAST} right and {LEAST} wrong ones; attack more images, or otherwise"
        )
    return ""


def _answers(out: Output) -> FloatArray:
    """All that a net says: its log-probabilities by class and in order, its class, its head."""
    logs = log_probabilities(out)
    ordered = logs.sort(-1, descending=True).values
    own = one_hot(prediction(out), logs.shape[-1])
    told: FloatArray = torch.cat([logs, ordered, own, out.aux], 1).double().numpy()
    return told


def _cross_fitted(model: Callable[[], Any], told: FloatArray, correct: BoolArray) -> FloatArray:
    """How probable it is that each answer is right, by a fit to the images of the other folds."""
    from sklearn.model_selection import StratifiedKFold

    found = np.zeros(len(correct))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    for others, these in folds.split(told, correct):
        fitted = model().fit(told[others], correct[others])
        found[these] = fitted.predict_proba(told[these])[:, 1]
    return found


def _line() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))


def _trees() -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        learning_rate=0.05, max_iter=150, max_leaf_nodes=15, min_samples_leaf=40, random_state=0
    )
