"""Records of many images: the sample and the exact curves of a page, resamples in blocks."""

import base64
import json
import re
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demur import metrics
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RejectorEvaluation, values
from demur.metrics import intervals
from demur.report import explorer
from demur.report.page import page_text
from demur.report.scored_runs import ScoredRun
from demur.runs import Run
from streaming import synthetic_run

N = 600
Json = dict[str, Any]


def results_of(folder: Path) -> ScoredRun:
    loaded = LoadedRun(Run(synthetic_run(folder / "run", N)), "cpu")
    evaluation = RejectorEvaluation.of(loaded)
    scored = [evaluation.score_record(one) for one in loaded.run.records("test")]
    return ScoredRun(loaded, evaluation, scored)


def data_of(page: str) -> Json:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data: Json = json.loads(found[1])
    return data


def decoded(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> ScoredRun:
    return results_of(tmp_path_factory.mktemp("large"))


def test_a_small_page_holds_every_image_and_no_sample(results: ScoredRun) -> None:
    page = page_text([results])
    assert "Sample" not in page
    assert 'id="sample"' not in page
    for entry, shown in zip(results.scored, data_of(page)["runs"][0]["records"], strict=True):
        record = entry.record
        assert not {"of", "exact", "top"} & set(shown)
        assert np.array_equal(decoded(shown["logits"], "<f4"), record.output.logits.numpy().ravel())
        for name, score in results.evaluation.scores.items():
            column = values(score, record).astype("<f4")
            assert np.array_equal(decoded(shown["scores"][name], "<f4"), column)


def test_a_large_page_holds_a_sample_and_exact_curves(
    results: ScoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer, "MOST_IMAGES", 200)
    monkeypatch.setattr(explorer, "MOST_POINTS", 40 * 3 * (len(results.evaluation.scores) + 1))
    monkeypatch.setattr(explorer, "TOP_LOGITS", 9)  # fewer than the classes
    page = page_text([results])
    assert page == page_text([results])
    assert "a sample (100 of 600 images)" in page
    assert "Of 10 classes the page holds" in page
    assert "Sample.prepare(JSON.parse" in page
    for entry, shown in zip(results.scored, data_of(page)["runs"][0]["records"], strict=True):
        record, correct = entry.record, entry.record.correct
        assert (shown["n"], shown["of"], shown["attacked"]) == (100, N, None)
        rows = decoded(shown["index"], "<i4")  # these images are numbered by their rows
        assert np.array_equal(decoded(shown["correct"], "u1"), correct[rows])
        for name, score in results.evaluation.scores.items():
            column, curve = values(score, record).astype("<f4"), shown["exact"][name]
            assert np.array_equal(decoded(shown["scores"][name], "<f4"), column[rows])
            kept = decoded(curve["threshold"], "<f4")
            assert 10 <= len(kept) <= 40
            assert kept[-1] == column.min()
            reached = column[:, None] >= kept
            assert np.array_equal(decoded(curve["right"], "<i4"), reached[correct].sum(0))
            assert np.array_equal(decoded(curve["wrong"], "<i4"), reached[~correct].sum(0))
            tpr, paper = decoded(curve["at"], "<f4")
            assert tpr == metrics.threshold_at_tpr(column, correct)
            accepted = metrics.stats_at_threshold(column, correct, float(paper)).accepted
            assert accepted == metrics.paper_stats(column, correct).accepted
            assert curve["auroc"] == metrics.auroc(values(score, record), correct)


def test_the_sample_is_stratified_and_reproducible() -> None:
    generator = np.random.default_rng(0)
    score, correct = generator.random(20_000), generator.random(20_000) < 0.73
    rows: Any = explorer.sampled_rows(score, 1000, correct)
    again: Any = explorer.sampled_rows(score.copy(), 1000, correct.copy())
    assert np.array_equal(rows, again)
    assert len(np.unique(rows)) == 1000
    assert np.array_equal(rows, np.sort(rows))
    parts = np.argsort(np.lexsort((score, correct)))[rows] // 20  # of 20 images each
    assert np.array_equal(np.sort(parts), np.arange(1000))
    assert abs(correct[rows].mean() - correct.mean()) <= 1 / 1000
    assert explorer.sampled_rows(score[:10_000], 1000, correct[:10_000]) == slice(None)


def test_a_sample_of_worst_scores_keeps_the_shares_at_every_threshold() -> None:
    worst = np.where(np.arange(30_000) % 3, -np.inf, np.random.default_rng(1).random(30_000))
    kept = worst[explorer.sampled_rows(worst)]
    assert len(kept) == 10_000
    for threshold in (0.0, 0.2, 0.9):
        assert abs((kept >= threshold).mean() - (worst >= threshold).mean()) <= 1e-4


def test_of_a_thousand_classes_the_page_holds_the_top_logits() -> None:
    logits = np.random.default_rng(2).normal(size=(50, 1000)).astype(np.float32) * 3
    top, kept, rest = explorer.top_logits(logits)
    dense = np.repeat(rest[:, None], 1000, axis=1)
    np.put_along_axis(dense, top, kept, 1)
    ours, exact = (
        np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (dense, logits.astype(float))
    )
    assert np.allclose(np.take_along_axis(ours, top, 1), np.take_along_axis(exact, top, 1))
    assert np.array_equal(dense.argmax(1), logits.argmax(1))
    shown = explorer._logits(logits, 100) | {"n": 50}
    assert len(json.dumps(shown)) < 8000 < logits.nbytes
    assert shown["classes"] == 1000
    assert set(explorer._logits(logits[:, :100], 100)) == {"logits"}


def test_resamples_in_blocks_equal_the_matrix_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = np.random.default_rng(3)
    score, correct = generator.random(5000), generator.random(5000) < 0.8
    chosen: list[metrics.Statistic] = [
        metrics.paper_accuracy(score, correct, 0.95),
        partial(metrics.Resamples.shares, part=score > 0.5, whole=correct),
    ]
    whole = metrics.resampled(5000, chosen)
    intervals.Resamples.of.cache_clear()
    monkeypatch.setattr(intervals, "MOST_COUNTS", 5000 * 16)
    tracemalloc.start()
    blocks = metrics.resampled(5000, chosen)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(map(np.array_equal, whole, blocks))
    assert len(blocks[0]) == intervals.RESAMPLES
    assert peak < 5000 * intervals.RESAMPLES * 4 / 3


def test_scores_that_are_no_numbers_are_refused() -> None:
    correct = np.array([True, False])
    with pytest.raises(BadInput, match="NaN"):
        explorer.exact_curve(np.array([0.1, np.nan]), correct, 10)
    none = explorer.exact_curve(np.array([0.1, 0.2]), np.array([False, False]), 10)
    assert none["at"].tolist() == [np.inf, np.inf]
