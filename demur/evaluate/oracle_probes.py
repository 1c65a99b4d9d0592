"""Oracle probes: an upper estimate of how well correct predictions can be recognised.

    scores = probe_scores(record)           # {"outputs, linear (oracle)": N scores, ...}

A probe is a classifier of correct and wrong predictions of the net. It is trained with the labels
of the record that it scores, which no deployed rejector has. Scores are cross-fitted: the model
that scores an image was fitted to the other folds.
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
MIN_PER_OUTCOME = 100  # least number of correct and of wrong predictions to fit a probe
LINEAR, TREES = "outputs, linear (oracle)", "outputs, trees (oracle)"
FEATURES = "features, linear (oracle)"  # features and outputs
PROBES = (LINEAR, TREES, FEATURES)


def probe_scores(record: Record) -> dict[str, FloatArray]:
    """Scores (N) of each probe that the record has inputs for; BadInput if there is none."""
    if reason := why_unprobed(record):
        raise BadInput(f"the record of {record.label} cannot be probed: {reason}")
    out = record.output
    inputs = _probe_inputs(out)
    scores = {
        LINEAR: _cross_fit(_linear_model, inputs, record.correct),
        TREES: _cross_fit(_tree_model, inputs, record.correct),
    }
    if out.feature.shape[-1]:
        both = np.concatenate([inputs, out.feature.double().numpy()], 1)
        scores[FEATURES] = _cross_fit(_linear_model, both, record.correct)
    return scores


def why_unprobed(record: Record) -> str:
    """Reason why no probe can be fitted to a record; empty if one can."""
    if record.scores_only:
        return "the record has only scores; attack the run again and archive it without --only"
    correct = int(record.correct.sum())
    if min(correct, len(record.y) - correct) < MIN_PER_OUTCOME:
        return (
            f"{correct} of {len(record.y)} predictions are correct, and a probe needs "
            f"{MIN_PER_OUTCOME} correct and {MIN_PER_OUTCOME} wrong ones; attack more images or "
            "use another attack"
        )
    return ""


def _probe_inputs(out: Output) -> FloatArray:
    """Log-probabilities by class and sorted, predicted class (one-hot) and aux; N, 3C + H."""
    logs = log_probabilities(out)
    ordered = logs.sort(-1, descending=True).values
    predicted = one_hot(prediction(out), logs.shape[-1])
    inputs: FloatArray = torch.cat([logs, ordered, predicted, out.aux], 1).double().numpy()
    return inputs


def _cross_fit(model: Callable[[], Any], inputs: FloatArray, correct: BoolArray) -> FloatArray:
    """Probability that each prediction is correct, by a model fitted to the other folds; N."""
    from sklearn.model_selection import StratifiedKFold

    scores = np.zeros(len(correct))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    for train, test in folds.split(inputs, correct):
        fitted = model().fit(inputs[train], correct[train])
        scores[test] = fitted.predict_proba(inputs[test])[:, 1]
    return scores


def _linear_model() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))


def _tree_model() -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        learning_rate=0.05, max_iter=150, max_leaf_nodes=15, min_samples_leaf=40, random_state=0
    )
