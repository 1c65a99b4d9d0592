"""The sanity check of infinite and NaN objectives: pytest turns warnings into errors."""

import math
from dataclasses import replace

import numpy as np
import pytest

from demur.attacks import UntargetedMargin
from demur.errors import BadInput
from demur.runs import Record
from demur.sanity.comparisons import paired_p_value
from demur.sanity.evidence import SIGNIFICANCE, mean_count, p_above
from demur.sanity.single_records import NOT_RISEN, _median, _rise
from tests.test_sanity import PLAIN, clean, made, the_flag


def pair_of_records(factor: float) -> tuple[Record, Record]:
    """A clean and an attacked record whose logits are multiplied by a factor."""
    attacked = made(replace(PLAIN, objective=UntargetedMargin()), 0, margin=3.0, label="pgd-20")
    unattacked = clean()
    for record in (attacked, unattacked):
        record.arrays["logits"][:, 0] *= factor
        record.arrays["logits"][:, 1:] = -record.arrays["logits"][:, :1]
    return unattacked, attacked


def test_a_nan_objective_has_not_risen() -> None:
    unattacked, attacked = pair_of_records(math.nan)
    unattacked.arrays["logits"][:, 0] = 1.0
    unattacked.arrays["logits"][:, 1:] = 0.0
    flag = the_flag(NOT_RISEN, unattacked, attacked)
    assert "raised UntargetedMargin() on 0.0% of the 200 images" in flag.observed
    assert "the median change is 0." in flag.observed


@pytest.mark.parametrize("factor", [1e38, math.inf])
def test_infinite_logits_are_an_error(factor: float) -> None:
    with pytest.raises(BadInput, match="the model's logits are not a number"):
        the_flag(NOT_RISEN, *pair_of_records(factor))


def test_differences_and_their_median() -> None:
    after = np.array([1.0, np.inf, np.inf, -np.inf, np.nan, 2.0])
    before = np.array([0.5, np.inf, 0.0, 0.0, 0.0, np.nan])
    assert _rise(after, before).tolist() == [0.5, 0.0, np.inf, -np.inf, 0.0, 0.0]
    assert _median(np.array([3.0, 1.0, 2.0])) == 2.0
    assert _median(np.array([4.0, 1.0, 2.0, 0.0])) == 1.5
    assert _median(np.array([-np.inf, -np.inf, np.inf, np.inf])) == -np.inf


def test_one_draw_for_all_images_of_a_pass_is_one_observation() -> None:
    """Of passes that are right on all images or on none, only their number counts."""
    draw = np.random.default_rng(0)
    alarms = 0
    for _ in range(200):
        first, second = (draw.random((20, 1)) < 0.5) & np.ones((2, 1, 100), bool)
        first, second = (draw.permutation(one) for one in (first, second))
        alarms += paired_p_value(first, second) < SIGNIFICANCE
        alarms += p_above(first, 0.5) < SIGNIFICANCE
    assert alarms <= 12  # of 400
    better = draw.random((20, 100)) < np.where(draw.random((20, 1)) < 0.5, 0.9, 0.6)
    assert paired_p_value(better, draw.random((20, 100)) < 0.5) < SIGNIFICANCE
    assert p_above(better, 0.4) < SIGNIFICANCE < p_above(better, 0.75)


def test_one_pass_is_tested_exactly() -> None:
    first, second = np.arange(20) < 8, np.zeros(20, bool)
    assert paired_p_value(first[None], second[None]) == pytest.approx(0.5**8)
    assert paired_p_value(second[None], second[None]) == 1
    assert p_above(np.ones((1, 5), bool), 0.1) == pytest.approx(1e-5)


def test_passes_that_agree_and_single_images() -> None:
    same = np.ones((9, 4), bool)
    assert (p_above(same, 0.5), p_above(same, 1), p_above(same[:, :1], 0.5)) == (0, 1, 1)
    assert paired_p_value(same, ~same) == 0
    assert [mean_count(one) for one in (same, same[:1, :3], np.eye(3, 4) > 0)] == ["4", "3", "1"]
