"""Thresholds with a promise that holds, with the confidence asked for, on images never seen.

    found = certify(score, correct, Risk(0.05))                # one score, (N,)
    found = certify(con_and_rcon, correct, TPR(0.95))          # two, (N, 2): both must be reached
    found.thresholds, found.sentence, found.risk_interval      # or Uncertified is raised

A seeded draw, blind to scores and labels, makes some images the pilot. It sets the thresholds to
be tested and where testing starts; the other images test them.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from demur.calibrate.binomial import lower_bound, upper_bound
from demur.calibrate.guarantee import Guarantee, Quantity, percent
from demur.calibrate.sequential_test import allocate_error, last_passing
from demur.calibrate.shortfall import Shortfall, Uncertified
from demur.calibrate.threshold_path import ANY_SCORE, Counts, counted, thresholds
from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray, Interval
from demur.metrics.checks import check_share, flags, floats, same_length
from demur.spec import Spec, show

GUARANTEED = 0.9  # of the error allowed; the ends of the intervals have the rest
INTERVALS = 3
PILOT = 5  # times the root of n for each score: more costs tests, less leaves a poor path
MOST_PILOT = 5  # one image in five


@dataclass(frozen=True)
class Certificate:
    """A promise, and what the test images showed at the thresholds chosen for it.

    With the confidence stated the promise and all three intervals hold together, for images drawn
    like the calibration ones. Attacked images are not, and a seed must not be chosen by outcome.
    """

    guarantee: Guarantee
    confidence: float
    thresholds: tuple[float, ...]
    seed: int
    candidates: int
    pilot: int
    n: int  # test images; the counts below are of these
    right: int
    accepted: int
    wrong: int  # accepted though wrong

    @property
    def kept(self) -> int:
        """The right answers accepted."""
        return self.accepted - self.wrong

    @property
    def risk_interval(self) -> Interval:
        """Of the wrong among the accepted."""
        return self._interval("risk", self.wrong, self.accepted)

    @property
    def tpr_interval(self) -> Interval:
        """Of the accepted among the right."""
        return self._interval("tpr", self.kept, self.right)

    @property
    def coverage_interval(self) -> Interval:
        """Of the accepted among all."""
        return self._interval("coverage", self.accepted, self.n)

    @property
    def sentence(self) -> str:
        """The promise as it may be repeated."""
        start = f"{self.guarantee.statement} with {percent(self.confidence)} confidence"
        if all(t == ANY_SCORE for t in self.thresholds):
            return f"{start}, accepting every score"
        at = " and ".join("any" if t == ANY_SCORE else f"{t:.6g}" for t in self.thresholds)
        return f"{start}, accepting scores from {at} up"

    def plain(self) -> dict[str, Any]:
        """The certificate as JSON values."""
        describe_counts = {f.name: getattr(self, f.name) for f in fields(self)} | {
            "guarantee": self._promised(),
            "thresholds": list(self.thresholds),
            "sentence": self.sentence,
        }
        for share in ("risk", "tpr", "coverage"):
            describe_counts[f"{share}_interval"] = getattr(self, f"{share}_interval")._asdict()
        return describe_counts

    def _promised(self) -> str:
        """The promise as text, with the confidence it was made with."""
        made = self.guarantee
        if not isinstance(made, Spec):
            return made.statement
        own: dict[str, Any] = {"confidence": self.confidence}
        sure = "confidence" in {f.name for f in fields(made)}
        return show(replace(made, **own) if sure else made)

    def _interval(self, share: Quantity, hits: int, trials: int) -> Interval:
        """Clopper and Pearson's, with room for every candidate, cut where the promise ends it."""
        error = (1 - GUARANTEED) * (1 - self.confidence) / (2 * INTERVALS * self.candidates)
        low, high = float(lower_bound(hits, trials, error)), float(upper_bound(hits, trials, error))
        if share == self.guarantee.quantity and self.guarantee.is_upper_bound:
            high = min(high, self.guarantee.level)
        elif share == self.guarantee.quantity:
            low = max(low, self.guarantee.level)
        return Interval(low, high)


def certify(
    scores: ArrayLike,
    correct: ArrayLike,
    guarantee: Guarantee,
    confidence: float | None = None,
    *,
    seed: int = 0,
) -> Certificate:
    """The thresholds that keep the promise; the promise's own confidence if none is given.

    Of thresholds that pass, a promised risk takes those of the largest coverage, a promised TPR or
    coverage those that accept the fewest wrong answers. A score of -inf is never accepted.
    """
    columns, right = _checked(scores, correct)
    sure = guarantee.confidence if confidence is None else confidence
    check_share("level", guarantee.level, whole=True)
    check_share("confidence", sure)
    pilot = _drawn(len(right), columns.shape[1], seed)
    path = thresholds(columns[pilot], right[pilot])
    seen, tests = (counted(path, columns[part], right[part]) for part in (pilot, ~pilot))
    shares = allocate_error(guarantee, seen, tests.n, GUARANTEED * (1 - sure))
    p_value = guarantee.p_value(*guarantee.hits_and_trials(tests))
    # a risk is walked from strict to loose, a share to be kept from loose to strict; the path is
    # nested, so the last to pass has the largest coverage, or the fewest wrong answers
    way = np.arange(len(path)) if guarantee.is_upper_bound else np.arange(len(path))[::-1]
    passed = last_passing(p_value[way], shares[way])
    if passed is None:
        raise Uncertified(_shortfall(guarantee, sure, path, seen.n, tests, shares))
    place = int(way[passed])
    return Certificate(
        guarantee, sure, tuple(path[place].tolist()), seed, len(path), seen.n, tests.n, tests.right,
        int(tests.accepted[place]), int(tests.wrong[place]),
    )  # fmt: skip


def _drawn(n: int, scores: int, seed: int) -> BoolArray:
    """Which of n images are the pilot; the number and the seed alone decide."""
    size = max(1, min(n // MOST_PILOT, math.ceil(PILOT * scores * math.sqrt(n))))
    pilot = np.zeros(n, dtype=np.bool_)
    pilot[np.random.default_rng(seed).permutation(n)[:size]] = True
    return pilot


def _shortfall(
    guarantee: Guarantee,
    sure: float,
    path: FloatArray,
    pilot: int,
    tests: Counts,
    shares: FloatArray,
) -> Shortfall:
    """What came of the place with the largest start."""
    place = int(np.argmax(shares))
    hits, trials = (int(part[place]) for part in guarantee.hits_and_trials(tests))
    at = tuple(path[place].tolist())
    return Shortfall(guarantee, sure, at, pilot + tests.n, hits, trials, float(shares[place]))


def _checked(scores: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, BoolArray]:
    """The scores as (N, 1) or (N, 2) and the correctness of the same images."""
    right = flags(correct, "correct")
    table = np.asarray(scores)
    columns = list(table.T) if table.ndim == 2 else [table]
    if len(columns) not in (1, 2):
        raise BadInput(f"scores has shape {table.shape}; give one or two scores for each image")
    named = {f"score {place}": floats(c, f"score {place}") for place, c in enumerate(columns, 1)}
    if same_length(**named, correct=right) < 2:
        raise BadInput("one image cannot both set a threshold and test it; give at least two")
    return np.stack(list(named.values()), axis=1), right
