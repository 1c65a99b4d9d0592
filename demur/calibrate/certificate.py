"""Thresholds with a guarantee for images to come, at a given confidence.

A random pilot, drawn without regard to scores and labels, sets the candidate thresholds and the
order of their tests. The other images test them in sequence by the fallback procedure (Wiens 2003).
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from demur.errors import BadInput
from demur.metrics import BoolArray, FloatArray, Interval
from demur.metrics.checks import IntArray, check_share, flags, floats, same_length
from demur.metrics.intervals import binomial_cdf, binomial_sf, lower_bound, upper_bound
from demur.metrics.thresholds import ANY_SCORE, Counts, build_path, count_decisions
from demur.rejectors.rule import OperatingPoint
from demur.spec import Spec, show

Quantity = Literal["risk", "tpr", "coverage"]
GUARANTEE_SHARE = 0.9  # of the allowed error; the intervals have the rest
SHARES = get_args(Quantity)  # that have an interval
# A pilot has PILOT_FACTOR * sqrt(n) images per score, at most n / MAX_PILOT_INVERSE. A larger one
# takes images from the tests, a smaller one gives a worse path.
PILOT_FACTOR, MAX_PILOT_INVERSE = 5, 5
STARTS = 4  # of the test of a risk
MAX_TRIALS = 10**7
LEAST_MORE = 1.3  # times the images that did not suffice
USEFUL = 0.05  # of the images: a threshold that accepts fewer is not proposed


class Guarantee(OperatingPoint):
    """An operating point whose level `certify_threshold` can guarantee.

    The share is binomial: errors among the accepted (risk), accepted among the correct (TPR),
    or accepted among all (coverage). For thresholds that are fixed beforehand its test is
    exact, with ties or without.
    """

    quantity: Quantity
    is_upper_bound: bool = False  # whether the share stays at or below `level`, else at or above
    level: float
    confidence: float = 0.95
    claim: str  # the guarantee in words, with {} for the level
    observation: str  # the counts in words, with {} for hits and trials

    @property
    def statement(self) -> str:
        return self.claim.format(percent(self.level))

    def hits_and_trials(self, counts: Counts) -> tuple[IntArray, IntArray]:
        """Numerator and denominator of the share for each candidate on a path, K each."""
        if self.quantity == "risk":
            return counts.accepted_wrong, counts.accepted
        if self.quantity == "tpr":
            return counts.accepted_correct, np.full_like(counts.accepted, counts.correct)
        return counts.accepted, np.full_like(counts.accepted, counts.n)

    def p_value(self, hits: IntArray | int, trials: IntArray | int) -> FloatArray:
        """Probability of such counts, or better ones, if the guarantee does not hold."""
        return (binomial_cdf if self.is_upper_bound else binomial_sf)(hits, trials, self.level)

    def bound(self, hits: int, trials: int, error: float) -> float:
        """Best level that can be guaranteed from these counts with probability 1 - error."""
        return float((upper_bound if self.is_upper_bound else lower_bound)(hits, trials, error))


def percent(share: float) -> str:
    """Share as a percentage of at most four digits."""
    return f"{100 * share:.4g}%"


@dataclass(frozen=True)
class Certificate:
    """A guarantee, its thresholds, and the counts of the test images at these thresholds.

    The guarantee and all three intervals hold together with the stated confidence, for images
    from the distribution of the calibration images. Attacked images are from another one. The
    seed must not be selected by the outcome.
    """

    guarantee: Guarantee
    confidence: float
    thresholds: tuple[float, ...]
    seed: int
    candidates: int
    pilot: int
    n: int  # test images; the counts below are of these
    correct: int  # correct predictions
    accepted: int
    accepted_wrong: int  # accepted errors
    under: str = ""  # worst-score attack on the images; empty without one

    @property
    def accepted_correct(self) -> int:
        return self.accepted - self.accepted_wrong

    @property
    def risk_interval(self) -> Interval:
        return self._interval("risk", self.accepted_wrong, self.accepted)

    @property
    def tpr_interval(self) -> Interval:
        return self._interval("tpr", self.accepted_correct, self.correct)

    @property
    def coverage_interval(self) -> Interval:
        return self._interval("coverage", self.accepted, self.n)

    @property
    def sentence(self) -> str:
        """The guarantee and its thresholds in words."""
        start = _claim(self.guarantee, self.confidence, self.under)
        end = "; a stronger attack may break this" if self.under else ""
        if all(t == ANY_SCORE for t in self.thresholds):
            return f"{start}, accepting every score{end}"
        at = " and ".join("any" if t == ANY_SCORE else f"{t:.6g}" for t in self.thresholds)
        return f"{start}, accepting scores from {at} up{end}"

    def to_json(self) -> dict[str, Any]:
        guarantee: Any = self.guarantee
        if isinstance(guarantee, Spec) and "confidence" in {f.name for f in fields(guarantee)}:
            guarantee = replace(guarantee, **{"confidence": self.confidence})
        intervals = {f"{name}_interval": getattr(self, f"{name}_interval") for name in SHARES}
        return vars(self) | {
            "guarantee": show(guarantee) if isinstance(guarantee, Spec) else guarantee.statement,
            "thresholds": list(self.thresholds),
            "sentence": self.sentence,
            **{name: interval._asdict() for name, interval in intervals.items()},
        }

    def _interval(self, share: Quantity, hits: int, trials: int) -> Interval:
        """Clopper-Pearson interval, Bonferroni-corrected, cut at the guaranteed level."""
        error = (1 - GUARANTEE_SHARE) * (1 - self.confidence) / (2 * len(SHARES) * self.candidates)
        low, high = float(lower_bound(hits, trials, error)), float(upper_bound(hits, trials, error))
        if share == self.guarantee.quantity and self.guarantee.is_upper_bound:
            high = min(high, self.guarantee.level)
        elif share == self.guarantee.quantity:
            low = max(low, self.guarantee.level)
        return Interval(low, high)


def _claim(guarantee: Guarantee, confidence: float, under: str) -> str:
    attacked = f" under {under}" if under else ""
    return f"{guarantee.statement}{attacked} with {percent(confidence)} confidence"


@dataclass(frozen=True)
class Shortfall:
    """Counts on the test images at the threshold that more images would certify first."""

    guarantee: Guarantee
    confidence: float
    thresholds: tuple[float, ...]
    images: int  # pilot and test
    hits: int
    trials: int
    rate: float  # of hits among trials to come, an estimate
    error: float  # of the test
    under: str = ""  # as in a certificate

    @property
    def possible(self) -> float:
        """Level that can be guaranteed at these thresholds, rounded to the safe side."""
        bound = 10_000 * self.guarantee.bound(self.hits + self._spare, self.trials, self.error)
        return (math.ceil(bound) if self.guarantee.is_upper_bound else math.floor(bound)) / 10_000

    @property
    def needed(self) -> int | None:
        """Estimated number of images that suffice at that rate; None above MAX_TRIALS."""
        if self.trials == 0:
            return None
        enough = self.trials
        while not self._passes(enough):
            enough *= 2
            if enough > MAX_TRIALS:
                return None
        too_few = enough // 2
        while enough - too_few > 1 + enough // 100:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if self._passes(middle) else (middle, enough)
        images = math.ceil(self.images * max(enough / self.trials, LEAST_MORE))
        unit: int = 10 ** max(0, len(str(images)) - 2)  # of the second digit
        return -(-images // unit) * unit

    @property
    def sentence(self) -> str:
        """What failed and what to do instead, for an error message."""
        needed = self.needed
        start = f"no threshold gives {_claim(self.guarantee, self.confidence, self.under)}"
        if self.trials == 0:
            return f"{start}: {self.images:,} images are too few to test any; give more"
        counts = self.guarantee.observation.format(f"{self.hits:,}", f"{self.trials:,}")
        observed = f"{counts} ({percent(self.hits / self.trials)}) of the images that tested it"
        if needed is not None:
            advice = f"give about {needed:,} images instead of {self.images:,} (an estimate)"
        elif self.guarantee.is_upper_bound and self.hits <= self.guarantee.level * self.trials:
            advice = f"{self.images:,} images are too few to say how many would do; give more"
        else:
            advice = "more images would not help at that rate, but a better score might"
        is_weaker = (self.possible > self.guarantee.level) == self.guarantee.is_upper_bound
        if 0 < self.possible < 1 and is_weaker:
            bound = "at most" if self.guarantee.is_upper_bound else "at least"
            advice += f", or ask for {bound} {percent(self.possible)} and give new images, since"
            advice += " a level that these images suggested voids the confidence"
        return f"{start}: the most promising threshold had {observed}; {advice}"

    @property
    def _spare(self) -> int:
        """One error more than counted, for the choice of the threshold among others."""
        return int(self.guarantee.is_upper_bound and self.rate > 0)

    def _passes(self, trials: int) -> bool:
        """Whether the guarantee would pass its test with this many trials at that rate."""
        expected = round(self.rate * trials, 6)
        hits = math.ceil(expected) if self.guarantee.is_upper_bound else math.floor(expected)
        return bool(self.guarantee.p_value(hits + self._spare, trials) <= self.error)


class Uncertified(BadInput):
    """No thresholds give the guarantee with the required confidence.

    Args:
        shortfall: What is missing; its `sentence` is the message.
        about: What else is known of these images; it comes first in the message.

    Example:
        >>> import numpy as np
        >>> from demur import Risk, Uncertified, certify_threshold
        >>> score, correct = np.linspace(0, 1, 20), np.arange(20) % 2 == 0
        >>> try:
        ...     certify_threshold(score, correct, Risk(0.01))
        ... except Uncertified as error:
        ...     reason = str(error)
    """

    def __init__(self, shortfall: Shortfall, about: str = "") -> None:
        super().__init__(shortfall)
        self.shortfall, self.about = shortfall, about

    def __str__(self) -> str:
        return f"{self.about}; {self.shortfall.sentence}".removeprefix("; ")


def certify_threshold(
    scores: ArrayLike, correct: ArrayLike, guarantee: Guarantee, confidence: float | None = None,
    *, seed: int = 0, worst: ArrayLike | None = None, under: str = "",
) -> Certificate:  # fmt: skip
    """Choose thresholds that give a guarantee for images to come.

    Of the thresholds that pass, a risk takes those of the largest coverage, a TPR or coverage
    those with the fewest accepted errors.

    Args:
        scores: Scores of the calibration images, N or (N, 2); -inf is never accepted.
        correct: Whether each prediction is correct, N.
        guarantee: What to guarantee: a TPR, Coverage or Risk.
        confidence: Probability that the guarantee holds; None takes the guarantee's own.
        seed: Seed of the pilot; it must not be selected by the outcome.
        worst: Highest score of a wrong prediction that an attack found, N; -inf for none. A risk is
            then guaranteed under it: where it finds no accepted error, the clean image counts.
        under: That attack, for the sentence of the certificate.

    Returns:
        The certificate, with one threshold per score.

    Raises:
        Uncertified: If no threshold passes; the message says what would be needed.
        BadInput: If the arrays, the level or the confidence are invalid.

    Example:
        >>> import numpy as np
        >>> from demur import Risk, certify_threshold
        >>> certificate = certify_threshold(np.arange(500.0), np.arange(500) > 100, Risk(0.05))
    """
    columns, is_correct = _check_inputs(scores, correct)
    confidence = guarantee.confidence if confidence is None else confidence
    check_share("level", guarantee.level, allow_one=True)
    check_share("confidence", confidence)
    pilot = _draw_pilot(len(is_correct), columns.shape[1], seed)
    wrong = _wrong_scores(columns, is_correct, worst, guarantee)
    columns = np.maximum(columns, wrong)
    path = build_path(columns[pilot], is_correct[pilot])
    pilot_counts, tests = (
        count_decisions(path, columns[part], is_correct[part], wrong[part])
        for part in (pilot, ~pilot)
    )
    shares = allocate_error(guarantee, pilot_counts, tests.n, GUARANTEE_SHARE * (1 - confidence))
    p_value = guarantee.p_value(*guarantee.hits_and_trials(tests))
    # A risk is tested from strict to loose, a TPR or coverage from loose to strict. The path is
    # nested, so the last to pass has the largest coverage, or the fewest accepted errors.
    order = np.arange(len(path)) if guarantee.is_upper_bound else np.arange(len(path))[::-1]
    passed = last_passing(p_value[order], shares[order])
    if passed is None:
        about = guarantee, confidence, len(is_correct), float(shares.max()), under
        raise Uncertified(_shortfall(path, tests, *about))
    best = int(order[passed])
    return Certificate(
        guarantee, confidence, tuple(path[best].tolist()), seed, len(path), pilot_counts.n,
        tests.n, tests.correct, int(tests.accepted[best]), int(tests.accepted_wrong[best]),
        under,
    )  # fmt: skip


def allocate_error(guarantee: Guarantee, pilot: Counts, n: int, error: float) -> FloatArray:
    """Share of `error` for each candidate on the path (K), before a test on n images.

    TPR and coverage grow along the path and need one start, at the loosest candidate. The risk
    may rise and fall. Half of the error goes to the candidate that passes most clearly on the
    pilot images. The rest goes to candidates spread over all that pass there, so that the test
    restarts after a failure.
    """
    shares = np.zeros(len(pilot.accepted))
    if not guarantee.is_upper_bound:
        shares[-1] = error
        return shares
    part = error / (2 * STARTS)
    enough = math.log(part) / math.log1p(-guarantee.level)  # so many pass without any error
    first = min(int((pilot.accepted * n / pilot.n < enough).sum()), len(shares) - 1)
    hits, trials = guarantee.hits_and_trials(pilot)
    # one error more than counted, since a small pilot without errors is weak evidence
    spare = (guarantee.level * trials - hits - 1) / np.sqrt(np.maximum(trials, 1))
    shares[first + int(np.argmax(spare[first:]))] = error / 2
    passing = np.flatnonzero(hits <= guarantee.level * trials)
    last = max(first, passing[-1] if len(passing) else 0)
    starts = np.linspace(pilot.accepted[first], pilot.accepted[last], STARTS, endpoint=False)
    np.add.at(shares, np.searchsorted(pilot.accepted, starts), part)
    return shares


def _shortfall(
    path: FloatArray, tests: Counts, guarantee: Guarantee, confidence: float, images: int,
    error: float, under: str,
) -> Shortfall:  # fmt: skip
    """Return the counts of the candidate that passes with the fewest images more.

    If none would pass it is the one with the lowest rate. Rates of few trials are uncertain, so a
    trial with the rate of the loosest candidate is added to each. TPR and coverage have one.
    """
    hits, trials = guarantee.hits_and_trials(tests)
    overall = float(hits[-1] / max(trials[-1], 1))
    best, rate = len(hits) - 1, np.full(len(hits), overall)
    useful = trials >= max(1, USEFUL * tests.n)
    if guarantee.is_upper_bound and useful.any():
        rate = (hits + overall) / (trials + 1)
        best, times = int(np.argmin(np.where(useful, rate, np.inf))), 1
        while times * trials.max() <= MAX_TRIALS:
            expected = np.ceil(np.round(rate * trials * times, 6)).astype(np.int64)
            passing = useful & (guarantee.p_value(expected, trials * times) <= error)
            if passing.any():
                best = int(np.flatnonzero(passing)[-1])
                break
            times *= 2
    counts = int(hits[best]), int(trials[best]), float(rate[best])
    at = tuple(path[best].tolist())
    return Shortfall(guarantee, confidence, at, images, *counts, error, under)


def last_passing(p_value: FloatArray, shares: FloatArray) -> int | None:
    """Index of the last candidate that passes, from p-values and error shares (K); None if none.

    A candidate is tested at its own share plus what its predecessor hands on. If it passes it hands
    on everything, if it fails nothing. The probability that any candidate passes for which the
    guarantee does not hold is at most the sum of the shares, however the counts depend.
    """
    passed, error = None, 0.0
    for index, (p, share) in enumerate(zip(p_value.tolist(), shares.tolist(), strict=True)):
        error += share
        if error > 0 and p <= error:
            passed = index
        else:
            error = 0.0
    return passed


def _draw_pilot(n: int, scores: int, seed: int) -> BoolArray:
    """Mask of the pilot images (N), which depends on the numbers and the seed alone."""
    size = max(1, min(n // MAX_PILOT_INVERSE, math.ceil(PILOT_FACTOR * scores * math.sqrt(n))))
    pilot = np.zeros(n, dtype=np.bool_)
    pilot[np.random.default_rng(seed).permutation(n)[:size]] = True
    return pilot


def _check_inputs(scores: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, BoolArray]:
    """Scores as (N, 1) or (N, 2) and correctness (N) of the same images; BadInput otherwise."""
    is_correct = flags(correct, "correct")
    table = np.asarray(scores)
    columns = list(table.T) if table.ndim == 2 else [table]
    if len(columns) not in (1, 2):
        raise BadInput(f"scores has shape {table.shape}; give one or two scores for each image")
    named = {f"score {i}": floats(column, f"score {i}") for i, column in enumerate(columns, 1)}
    if same_length(**named, correct=is_correct) < 2:
        raise BadInput("one image cannot both set a threshold and test it; give at least two")
    return np.stack(list(named.values()), axis=1), is_correct


def _wrong_scores(
    columns: FloatArray, correct: BoolArray, worst: ArrayLike | None, guarantee: Guarantee
) -> FloatArray:
    """Highest scores (N, D) of a wrong prediction, under the attack if `worst` is given."""
    wrong: FloatArray = np.where(correct[:, None], -np.inf, columns)
    if worst is None:
        return wrong
    if guarantee.quantity != "risk" or columns.shape[1] > 1:
        raise BadInput(
            "under a worst-score attack only the risk of one score can be guaranteed; give a risk "
            "and a rejector with one threshold"
        )
    found = floats(worst, "worst")
    same_length(worst=found, correct=correct)
    return np.maximum(found[:, None], wrong)
