"""Bucket sizes: few, large enough, tight once the tuned capture pays; and the graphs for them."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from demur.attacks import CE, DLR
from demur.attacks.attack_model import Gradient, ObjectiveFunction
from demur.engine import graphs
from demur.engine.copies import Query
from demur.engine.graphs import (
    CAPTURE_COST,
    GRANULARITY,
    MAX_RATIO,
    MIN_BUCKET,
    UNTUNED_OVERHEAD,
    BatchBuckets,
    Bucket,
    QueryGraphs,
)
from demur.output import Output


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


# ------------------------------------------------------------------ the cache of captured queries


def compute(objective: ObjectiveFunction, query: Query, x: Tensor, *others: Tensor) -> Gradient:
    return Gradient(2 * x, x.sum(1), Output(x, x, x))


class FakeGraph:
    """A graph that is captured without a GPU, unless an error is set."""

    error: Exception | None = None

    def __init__(self, function: Callable[..., Gradient], *examples: Tensor, tune: bool) -> None:
        if self.error is not None:
            raise self.error
        self.function, self.inputs = function, list(examples)

    def __call__(self, *inputs: Tensor) -> Gradient:
        return self.function(*inputs)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(graphs, "CapturedGraph", FakeGraph)
    return []


def test_a_query_is_captured_once_for_each_bucket(messages: list[str]) -> None:
    cache = QueryGraphs(messages.append)
    cache.set_max_batch(64)
    x = torch.rand(20, 3)
    for tuned in (False, False, True, True):
        found = cache._replay(compute, CE(), "gradient", Bucket(32, tuned), x)
        assert torch.equal(found.grad, 2 * x)
        assert list(cache.captured) == [(CE(), "gradient", Bucket(32, tuned))]
    assert len(cache.captured[CE(), "gradient", Bucket(32, True)].inputs[0]) == 32
    cache.set_max_batch(64)
    assert len(cache.captured) == 1
    cache.set_max_batch(32)
    assert not cache.captured
    assert not messages


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("no capture")])
@pytest.mark.parametrize("eager_without_memory", [False, True])
def test_a_query_that_cannot_be_captured_runs_eagerly(
    error: Exception,
    eager_without_memory: bool,
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = QueryGraphs(messages.append, eager_without_memory=eager_without_memory)
    cache.set_max_batch(64)
    x, bucket = torch.rand(20, 3), Bucket(32, False)
    cache._replay(compute, DLR(), "gradient", bucket, x)
    monkeypatch.setattr(FakeGraph, "error", error)
    no_memory = isinstance(error, torch.OutOfMemoryError)
    if no_memory and not eager_without_memory:
        with pytest.raises(torch.OutOfMemoryError):
            cache._replay(compute, CE(), "gradient", bucket, x)
        assert (cache.eager, messages) == (set(), [])
        return
    assert torch.equal(cache._replay(compute, CE(), "gradient", bucket, x).grad, 2 * x)
    assert cache.eager == {CE()}
    assert len(cache.captured) == (0 if no_memory else 1), "the others leave only for memory"
    (message,) = messages
    assert message == (
        "the GPU memory is too small for CUDA graphs; use a smaller batch size"
        if no_memory
        else "cannot compile this objective, attacking it eagerly: no capture"
    )


def test_graphs_are_dropped_only_if_memory_is_short(
    messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = QueryGraphs(messages.append)
    cache.set_max_batch(64)
    cache._replay(compute, CE(), "gradient", Bucket(64, False), torch.rand(20, 3))
    for free, left in ((60, 1), (40, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 100))
        cache.drop_if_memory_is_short()
        assert len(cache.captured) == left
