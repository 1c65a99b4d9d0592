"""Test of many candidates in sequence that controls the family-wise error.

The fallback procedure (Wiens 2003): the allowed error is divided among the candidates before the
test images are used. A candidate is tested at its own share plus what its predecessor hands on. If
it passes it hands on everything, if it fails nothing. The probability that any candidate passes
for which the guarantee does not hold is at most the allowed error, however the counts depend.
"""

import math

import numpy as np

from demur.calibrate.guarantee import Guarantee
from demur.calibrate.threshold_path import Counts
from demur.metrics import FloatArray

STARTS = 4


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


def last_passing(p_value: FloatArray, shares: FloatArray) -> int | None:
    """Index of the last candidate that passes, from p-values and error shares (K); None if none."""
    passed, error = None, 0.0
    for index, (p, share) in enumerate(zip(p_value.tolist(), shares.tolist(), strict=True)):
        error += share
        if error > 0 and p <= error:
            passed = index
        else:
            error = 0.0
    return passed
