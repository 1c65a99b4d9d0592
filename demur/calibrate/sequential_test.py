"""Testing along a path so that a false promise is made no more often than the error allowed.

The fallback procedure (Wiens 2003): the error is shared out over places of the path before the
test images are looked at. A place is tested with its own share and all that the place before it
hands on; one that passes hands on everything, one that fails loses it. So the places where the
promise does not hold are tested with no more than the whole, however their counts hang together.
"""

import math

import numpy as np

from demur.calibrate.guarantee import Guarantee
from demur.calibrate.threshold_path import Counts
from demur.metrics import FloatArray

STARTS = 4


def allocate_error(guarantee: Guarantee, pilot: Counts, n: int, error: float) -> FloatArray:
    """Where the error goes on a path, in its order, to test n images after the pilot.

    A share that grows along the path needs one start, at its safe end. The risk goes up and down:
    half of the error goes where the pilot expects the clearest pass, the rest to places spread
    over all that it expects to pass, each a new start where the walk has failed before.
    """
    shares = np.zeros(len(pilot.accepted))
    if not guarantee.is_upper_bound:
        shares[-1] = error
        return shares
    part = error / (2 * STARTS)
    enough = math.log(part) / math.log1p(-guarantee.level)  # so many pass if none of them is wrong
    first = min(int((pilot.accepted * n / pilot.n < enough).sum()), len(shares) - 1)
    hits, trials = guarantee.hits_and_trials(pilot)
    # one wrong answer more than counted: a pilot that saw none knows little
    spare = (guarantee.level * trials - hits - 1) / np.sqrt(np.maximum(trials, 1))
    shares[first + int(np.argmax(spare[first:]))] = error / 2
    passing = np.flatnonzero(hits <= guarantee.level * trials)
    last = max(first, passing[-1] if len(passing) else 0)
    objectives = np.linspace(pilot.accepted[first], pilot.accepted[last], STARTS, endpoint=False)
    np.add.at(shares, np.searchsorted(pilot.accepted, objectives), part)
    return shares


def last_passing(p_value: FloatArray, shares: FloatArray) -> int | None:
    """The last place that passes, given every place's p-value and share of the error, or None."""
    passed, error = None, 0.0
    for place, (p, share) in enumerate(zip(p_value.tolist(), shares.tolist(), strict=True)):
        error += share
        if error > 0 and p <= error:
            passed = place
        else:
            error = 0.0
    return passed
