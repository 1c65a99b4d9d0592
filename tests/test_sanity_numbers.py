"""The sanity check of goals that are infinite or no numbers: pytest makes warnings errors."""

import math
from dataclasses import replace

import numpy as np
import pytest

from demur.attacks import LogitMargin
from demur.sanity.objective import STILL, _middle, _rise
from tests.test_sanity import PLAIN, clean, made, the_flag


@pytest.mark.parametrize("factor", [1e38, math.inf, math.nan])
def test_a_goal_beyond_all_numbers_has_not_moved(factor: float) -> None:
    attacked = made(replace(PLAIN, objective=LogitMargin()), 0, sure=3.0, label="pgd-20")
    untouched = clean()
    for record in (attacked, untouched):
        record.arrays["logits"][:, 0] *= factor
        record.arrays["logits"][:, 1:] = -record.arrays["logits"][:, :1]
    if math.isnan(factor):
        untouched.arrays["logits"][:, 0] = 1.0
        untouched.arrays["logits"][:, 1:] = 0.0
    flag = the_flag(STILL, untouched, attacked)
    assert "raised LogitMargin() on 0.0% of the 200 images" in flag.seen
    assert "the median change is 0." in flag.seen


def test_rises_and_their_middle() -> None:
    after = np.array([1.0, np.inf, np.inf, -np.inf, np.nan, 2.0])
    before = np.array([0.5, np.inf, 0.0, 0.0, 0.0, np.nan])
    assert _rise(after, before).tolist() == [0.5, 0.0, np.inf, -np.inf, 0.0, 0.0]
    assert _middle(np.array([3.0, 1.0, 2.0])) == 2.0
    assert _middle(np.array([4.0, 1.0, 2.0, 0.0])) == 1.5
    assert _middle(np.array([-np.inf, -np.inf, np.inf, np.inf])) == -np.inf
