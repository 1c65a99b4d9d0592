"""Batch sizes that are recorded: few, large enough, and fitting where it pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demur.engine.buckets import DEAR, GRAIN, SMALLEST, UNTRIED, WIDEST, BatchBuckets, Bucket


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_usual_rooms_are_few_and_large_enough(largest: int, count: int) -> None:
    bucket = BatchBuckets(largest, fits=False).bucket_for("look", count).size
    assert bucket >= count
    if count > largest:
        assert bucket == count
        return
    halved = {largest >> halvings for halvings in range(11)}
    assert bucket in halved | {3 * size // 4 for size in halved}
    assert 2 * bucket <= 3 * max(count, SMALLEST, largest // WIDEST) or bucket == largest


@pytest.mark.parametrize(
    ("count", "bucket"),
    [(1024, 1024), (769, 1024), (768, 768), (513, 768), (512, 512), (300, 384), (1, 16)],
)
def test_usual_rooms_are_halves_and_three_quarters(count: int, bucket: int) -> None:
    assert BatchBuckets(1024, fits=True).bucket_for("look", count) == Bucket(bucket, False)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 600)), max_size=300))
def test_every_careful_recording_was_paid_for(looks: list[tuple[str, int]]) -> None:
    """However the batches shrink: what was lost before is at least what recordings cost."""
    buckets, lost, careful = BatchBuckets(512, fits=True), {"a": 0.0, "b": 0.0}, set()
    for kind, count in looks:
        usual, bucket = buckets.usual(count), buckets.bucket_for(kind, count)
        assert count <= bucket.size <= usual
        if bucket.tuned:
            careful.add((kind, bucket.size))
            assert bucket.size == usual or (
                bucket.size % GRAIN == 0 and bucket.size - count < GRAIN
            )
        lost[kind] += 1 - (1 - UNTRIED) * min(-(-count // GRAIN) * GRAIN, usual) / usual
    for kind, paid in lost.items():
        assert sum(each == kind for each, _ in careful) * DEAR <= paid + 1e-9


def test_a_long_attack_gets_a_room_that_fits_and_a_short_one_does_not() -> None:
    buckets = BatchBuckets(1024, fits=True)
    looks = int(DEAR / (1 - (1 - UNTRIED) * 480 / 512)) + 1
    found = [buckets.bucket_for("value", 477) for _ in range(looks + 5)]
    assert found[: looks - 2] == [Bucket(512, False)] * (looks - 2)
    assert found[-1] == Bucket(480, True)
    assert buckets.bucket_for("gradient", 477) == Bucket(512, False), (
        "another look has paid for nothing yet"
    )
    buckets.forget()
    assert buckets.bucket_for("value", 477) == Bucket(512, False)


def test_a_room_that_fits_by_chance_is_still_recorded_with_care_when_that_pays() -> None:
    buckets = BatchBuckets(1000, fits=True)
    found = {buckets.bucket_for("value", 1000) for _ in range(int(DEAR / UNTRIED) + 2)}
    assert found == {Bucket(1000, False), Bucket(1000, True)}


def test_where_sizes_are_compiled_none_fits() -> None:
    buckets = BatchBuckets(1024, fits=False)
    assert {buckets.bucket_for("value", 477) for _ in range(2000)} == {Bucket(512, True)}
