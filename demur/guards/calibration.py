"""Thresholds of a guard, chosen on calibration images, with the figures for its model card.

Thresholds are certified where the images suffice. With fewer images a threshold for a TPR or a
coverage is the empirical one and has no certificate; a risk is never given without one.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from demur.calibrate import (
    TPR,
    ChanceTest,
    Coverage,
    Guarantee,
    Risk,
    Uncertified,
    certify_threshold,
    lower_bound,
    upper_bound,
)
from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray
from demur.metrics.checks import check_share
from demur.metrics.thresholds import ANY_SCORE
from demur.output import Output, check_logits, prediction
from demur.recipes import short_name
from demur.rejectors import Coupled, FittedScore, ImageRejector, OutputScore, Rejector
from demur.rejectors.image_scores import with_columns
from demur.rejectors.rule import Score, as_score
from demur.spec import Spec, show
from demur.spec.field_types import convert_value

BINS = 64  # of the calibration scores, for the drift test
ERROR = 0.025  # of each end of an interval


class GuardScore(NamedTuple):
    """One score of a guard: accept only where it reaches the threshold."""

    rejector: Rejector
    score: Score
    threshold: float  # -inf and ANY_SCORE accept every score

    @property
    def name(self) -> str:
        return short_name(self.rejector).replace("RCon", "R-Con")

    @property
    def rejects(self) -> bool:
        """Whether a finite score can lie below the threshold."""
        return self.threshold > ANY_SCORE


OVERRIDE = "accept_chance=True (--accept-chance) overrides"


class Calibrated(NamedTuple):
    """The scores with their thresholds, and what the model card says about them."""

    scores: tuple[GuardScore, ...]
    figures: dict[str, Any]  # JSON values


def guarantee_of(tpr: float | None, coverage: float | None, risk: float | None) -> Guarantee:
    """Return the guarantee that is asked for; a TPR of 95% if none is."""
    asked = {"tpr": tpr, "coverage": coverage, "risk": risk}
    given = [name for name, level in asked.items() if level is not None]
    if len(given) > 1:
        raise BadInput(f"{' and '.join(given)} are given; give one of tpr, coverage and risk")
    for name in given:
        check_share(name, convert_value(asked[name], float, name))
    if risk is not None:
        return Risk(risk)
    return TPR(0.95 if tpr is None else tpr) if coverage is None else Coverage(coverage)


def calibrate(
    rejector: Rejector, fitted: Score, out: Output, y: torch.Tensor, guarantee: Guarantee,
    confidence: float, attacked: Mapping[str, Any] = MappingProxyType({}),
    accept_chance: bool = False,
) -> Calibrated:  # fmt: skip
    """Choose the thresholds of a fitted rejector on the outputs for calibration images.

    `attacked` holds `worst` and `under` of `certify_threshold`. Raises Uncertified if a
    risk cannot be certified, and BadInput if an output is not a number or, unless `accept_chance`,
    if the accuracy is not above chance.
    """
    check_logits(out)
    correct: BoolArray = (prediction(out) == y).cpu().numpy()
    parts = [part for part, _ in fitted.rule(0.0).pairs]
    bound, _ = with_columns(tuple(parts))
    columns = np.stack([values(part, out) for part in bound], axis=1)  # N, K
    classes = out.logits.shape[1]
    chance = ChanceTest.of(int(correct.sum()), y.cpu().numpy(), classes, "calibration")
    if not (chance.passed or accept_chance):
        raise BadInput(f"{chance.sentence}; check the labels and the classes; {OVERRIDE}")
    certificate, shortfall = None, None
    try:
        found = certify_threshold(columns, correct, guarantee, confidence, **attacked)
        thresholds, sentence = found.thresholds, found.sentence
        # a threshold that accepts every score is null, as strict JSON needs
        finite = [t if np.isfinite(t) else None for t in thresholds]
        certificate = found.to_json() | {"thresholds": finite}
    except Uncertified as error:
        if guarantee.is_upper_bound:
            raise Uncertified(error.shortfall, chance.sentence) from None
        shortfall = str(error)
        chosen = guarantee.threshold(values(with_columns(fitted)[0], out), correct)
        thresholds = tuple(t for _, t in fitted.rule(chosen).pairs)
        sentence = f"{guarantee.statement} on the calibration images, without a guarantee"
    triples = zip(_parts(rejector), parts, map(float, thresholds), strict=True)
    scores = tuple(GuardScore(*one) for one in triples)
    accepted = np.all(columns >= np.array(thresholds), axis=1)
    figures = {
        "guarantee": show(guarantee) if isinstance(guarantee, Spec) else guarantee.statement,
        "confidence": confidence, "sentence": sentence, "shortfall": shortfall,
        "certificate": certificate, **decision_figures(accepted, correct),
        **score_histogram(columns[:, -1]), "chance_test": chance.to_json(),
    }  # fmt: skip
    return Calibrated(scores, figures)


def values(score: Score, out: Output) -> FloatArray:
    """Return the score of each image as float64, N; raise BadInput for one that is NaN."""
    if isinstance(score, FittedScore):
        out = out.to(next(score.buffers()).device)
    with torch.no_grad():
        found: FloatArray = as_score(score)(out).double().cpu().numpy()
    if np.isnan(found).any():
        raise BadInput("a calibration score is not a number; check the net and its normalisation")
    return found


def _parts(rejector: Rejector) -> tuple[Rejector, ...]:
    """The rejector of each score: two if it is coupled."""
    parts = (rejector.gate, rejector.score) if isinstance(rejector, Coupled) else (rejector,)
    found = tuple(part for part in parts if isinstance(part, Rejector))
    if len(found) < len(parts):
        raise BadInput("Coupled holds a score without a spec; couple rejectors, such as KD()")
    return found


def decision_figures(accepted: BoolArray, correct: BoolArray) -> dict[str, Any]:
    """Accuracy, coverage, TPR and risk of decisions with exact 95% intervals."""
    counts = (len(correct), correct.sum(), accepted.sum(), (accepted & correct).sum())
    return count_figures(*map(int, counts))


def count_figures(n: int, right: int, kept: int, kept_right: int) -> dict[str, Any]:
    """As `decision_figures`, from the numbers of images, correct, accepted, and both."""

    def share(hits: int, trials: int) -> dict[str, Any] | None:
        if trials == 0:
            return None
        low, high = lower_bound(hits, trials, ERROR), upper_bound(hits, trials, ERROR)
        return {"value": hits / trials, "lo": float(low), "hi": float(high), "n": trials}

    return {
        "images": n,
        "accuracy": share(right, n),
        "coverage": share(kept, n),
        "tpr": share(kept_right, right),
        "risk": share(kept - kept_right, kept),
    }


def score_histogram(score: FloatArray) -> dict[str, list[float] | list[int]]:
    """Counts of the calibration scores between their quantiles, for the drift test.

    A score s falls into bin i with edges[i - 1] <= s < edges[i].
    """
    finite = score[np.isfinite(score)]
    shares = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = np.unique(np.quantile(finite, shares)) if len(finite) else np.array([])
    counts = np.bincount(np.searchsorted(edges, score, side="right"), minlength=len(edges) + 1)
    return {"score_edges": edges.tolist(), "score_counts": counts.tolist()}


def fit_rejector(
    rejector: Rejector, fit: Callable[[], tuple[Output, torch.Tensor]] | None
) -> Score:
    """Return the fitted score of a rejector; `fit` gives outputs and labels if it needs them."""
    if all(isinstance(part, OutputScore | ImageRejector) for part in _parts(rejector)):
        return as_score(rejector)
    if fit is None:
        raise BadInput(
            f"{show(rejector)} is fitted to features; give x_fit and y_fit, not the "
            "calibration images"
        )
    return as_score(rejector.fit(*fit()))


def shown_temperature(rejector: Rejector) -> float:
    """Return the temperature of the score itself, 1 if it has none."""
    tau = getattr(_parts(rejector)[-1], "tau", 1.0)
    return float(tau)


def on_device(scores: tuple[GuardScore, ...], device: torch.device) -> tuple[GuardScore, ...]:
    """Return the scores with the buffers of fitted ones on a device."""
    return tuple(
        part._replace(score=part.score.to(device)) if isinstance(part.score, FittedScore) else part
        for part in scores
    )
