"""Oracle probes: what a rejector with the outputs of a net as inputs could reach.

scored = evaluation.score_record(record, probe_scores(record))
probe_sentence(scored)      # the best probe beside confidence
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from demur.errors import BadInput, import_optional
from demur.evaluate import ScoredRecord
from demur.metrics import FloatArray
from demur.output import log_probabilities, prediction
from demur.report.terminal import signed
from demur.runs import Record

FOLDS = 5
MIN_PER_OUTCOME = 100  # least number of correct and of wrong predictions to fit a probe
LINEAR, TREES = "outputs, linear (oracle)", "outputs, trees (oracle)"
FEATURES = "features, linear (oracle)"  # features and outputs
PROBES = (LINEAR, TREES, FEATURES)


def probe_scores(record: Record) -> dict[str, FloatArray]:
    """Scores (N) of each probe that the record has inputs for; BadInput if there is none.

    A probe is a classifier of correct and wrong predictions of the net. It is trained with the
    labels of the record that it scores, which no deployed rejector has. Scores are cross-
    fitted: the model that scores an image was fitted to the other folds.
    """
    import_optional("sklearn", "probes need scikit-learn", "'demur[sklearn]'")
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if reason := why_unprobed(record):
        raise BadInput(f"the record of {record.label} cannot be probed: {reason}")
    out, correct = record.output, record.correct
    logs = log_probabilities(out)
    ordered = logs.sort(-1, descending=True).values
    predicted = one_hot(prediction(out), logs.shape[-1])
    inputs = torch.cat([logs, ordered, predicted, out.aux], 1).double()  # N, 3C + H
    linear = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    trees = HistGradientBoostingClassifier(
        learning_rate=0.05, max_iter=150, max_leaf_nodes=15, min_samples_leaf=40, random_state=0
    )
    probes = {LINEAR: (linear, inputs), TREES: (trees, inputs)}
    if out.feature.shape[-1]:
        probes[FEATURES] = (linear, torch.cat([inputs, out.feature.double()], 1))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)

    def scores(model: Any, x: Tensor) -> FloatArray:
        found = cross_val_predict(model, x.numpy(), correct, cv=folds, method="predict_proba")
        return np.asarray(found[:, 1])

    return {name: scores(*probe) for name, probe in probes.items()}


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


def probe_sentence(scored: ScoredRecord) -> str:
    """Compare the AUROC of the best probe with that of confidence."""
    rows = [row for row in scored.rows if row.rejector in PROBES]
    best = max(rows, key=lambda row: row.ranking.auroc)
    gap = best.ranking.auroc_vs_con
    source = "features" if best.rejector == FEATURES else "outputs"
    if gap.lo > 0:
        found = f"the {source} hold more information than confidence"
    elif gap.hi < 0:
        found = "no probe reaches confidence, so this is inconclusive; use more images"
    else:
        found = "no probe finds more information than confidence"
    value, low, high = (signed(end, 1, 3) for end in gap[:3])
    where = f"{scored.summary.attack} (n={scored.summary.n})"
    return f"{where}: {found}: AUROC {value} [{low}, {high}], {best.rejector}"
