"""Bucket sizes: few, large enough, and tight once the tuned capture pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demur.engine.graphs import (
    CAPTURE_COST,
    GRANULARITY,
    MAX_RATIO,
    MIN_BUCKET,
    UNTUNED_OVERHEAD,
    BatchBuckets,
    Bucket,
)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_coarse_buckets_are_few_and_large_enough(largest: int, count: int) -> None:
    bucket = BatchBuckets(largest, tune_later=False).bucket_for("value", count).size
    assert bucket >= count
    if count > largest:
        assert bucket == count
        return
    halved = {largest >> halvings for halvings in range(11)}
    assert bucket in halved | {3 * size // 4 for size in halved}
    assert 2 * bucket <= 3 * max(count, MIN_BUCKET, largest // MAX_RATIO) or bucket == largest


@pytest.mark.parametrize(
    ("count", "bucket"),
    [(1024, 1024), (769, 1024), (768, 768), (513, 768), (512, 512), (300, 384), (1, 16)],
)
def test_coarse_buckets_are_halves_and_three_quarters(count: int, bucket: int) -> None:
    buckets = BatchBuckets(1024, tune_later=True)
    assert buckets.bucket_for("value", count) == Bucket(bucket, False)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 600)), max_size=300))
def test_tuned_captures_never_cost_more_than_the_time_wasted_before(
    queries: list[tuple[str, int]],
) -> None:
    """The ski-rental rule holds for every sequence of batch sizes."""
    buckets, wasted, tuned = BatchBuckets(512, tune_later=True), {"a": 0.0, "b": 0.0}, set()
    for kind, count in queries:
        coarse, bucket = buckets.coarse_size(count), buckets.bucket_for(kind, count)
        assert count <= bucket.size <= coarse
        if bucket.tuned:
            tuned.add((kind, bucket.size))
            assert bucket.size == coarse or (
                bucket.size % GRANULARITY == 0 and bucket.size - count < GRANULARITY
            )
        tight = min(-(-count // GRANULARITY) * GRANULARITY, coarse)
        wasted[kind] += 1 - (1 - UNTUNED_OVERHEAD) * tight / coarse
    for kind, waste in wasted.items():
        assert sum(of_kind == kind for of_kind, _ in tuned) * CAPTURE_COST <= waste + 1e-9


def test_a_long_attack_gets_a_tight_bucket_and_a_short_one_does_not() -> None:
    buckets = BatchBuckets(1024, tune_later=True)
    queries = int(CAPTURE_COST / (1 - (1 - UNTUNED_OVERHEAD) * 480 / 512)) + 1
    found = [buckets.bucket_for("value", 477) for _ in range(queries + 5)]
    assert found[: queries - 2] == [Bucket(512, False)] * (queries - 2)
    assert found[-1] == Bucket(480, True)
    other = buckets.bucket_for("gradient", 477)
    assert other == Bucket(512, False), "each kind of query has its own account"
    buckets.reset()
    assert buckets.bucket_for("value", 477) == Bucket(512, False)


def test_a_batch_of_exactly_the_coarse_size_is_tuned_once_that_pays() -> None:
    buckets = BatchBuckets(1000, tune_later=True)
    queries = int(CAPTURE_COST / UNTUNED_OVERHEAD) + 2
    found = {buckets.bucket_for("value", 1000) for _ in range(queries)}
    assert found == {Bucket(1000, False), Bucket(1000, True)}


def test_without_tune_later_all_buckets_are_coarse_and_tuned() -> None:
    buckets = BatchBuckets(1024, tune_later=False)
    assert {buckets.bucket_for("value", 477) for _ in range(2000)} == {Bucket(512, True)}
