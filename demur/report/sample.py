"""What a page holds of a record with many images: a stratified sample, and exact curves."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from demur.metrics import BoolArray, FloatArray, threshold_at_tpr
from demur.metrics.checks import IntArray, scored_pair
from demur.metrics.thresholds import paper_level_index, score_levels
from demur.noise import uniform

LIMIT = 10_000  # images of a record; the page holds all images of a smaller one
ROWS, POINTS = 15_000, 100_000  # of all samples of a page, and of all curves
MOST_CLASSES, TOP = 100, 10  # with more classes, and in a sample, this many logits of an image
TPR = 0.95


Share = tuple[int, int, int]  # pictures, images of a sample, points of a curve


def sampled_rows(
    score: FloatArray, count: int = LIMIT, correct: BoolArray | None = None
) -> IntArray | slice:
    """Rows of the images of a page: all up to LIMIT, else `count`, ascending.

    The images, ordered by correctness and score, are cut into `count` equal parts. One image of
    each is drawn by its number, so that the same record gives the same sample.
    """
    if len(score) <= LIMIT:
        return slice(None)
    edges = np.arange(count + 1) * len(score) // count
    drawn = uniform(0, torch.arange(count), 0, ()).double().numpy()
    places = edges[:-1] + (drawn * np.diff(edges)).astype(np.int64)
    return np.sort(np.lexsort((score,) if correct is None else (score, correct))[places])


def exact_curve(score: FloatArray, correct: BoolArray, points: int) -> dict[str, NDArray[Any]]:
    """Correct and wrong counts of all images at or above about `points` of their scores.

    The thresholds descend and are closest at the highest scores. `at` holds those of TPR-95 and,
    as score >= threshold, of the paper's TPR-95.
    """
    score, correct = scored_pair(score.astype(np.float32), correct)  # rounded as on the page
    threshold, right, wrong = score_levels(score, correct)
    last, half = len(threshold) - 1, points // 2
    places = np.append(np.linspace(0, last, half), np.geomspace(1, last + 1, half) - 1)
    kept = np.unique(np.rint(places).astype(np.int64)) if last >= points else slice(None)
    best = paper_level_index(right, wrong, TPR)
    tpr = threshold_at_tpr(score, correct, TPR) if correct.any() else np.inf
    at = np.array([tpr, threshold[best - 1] if best else np.inf])
    return {"threshold": threshold[kept], "at": at, "right": right[kept], "wrong": wrong[kept]}


def top_logits(logits: NDArray[Any]) -> tuple[IntArray, FloatArray, FloatArray]:
    """Classes and values of the largest logits (N, TOP), and one logit for all others (N).

    It spreads their mass evenly, so that the softmax at temperature 1 is exact.
    """
    classes = np.argpartition(-logits, TOP, axis=1)[:, :TOP]
    others = logits.astype(np.float64)
    kept = np.take_along_axis(others, classes, 1)
    np.put_along_axis(others, classes, -np.inf, 1)
    mean = np.exp(others - others.max(1, keepdims=True)).sum(1) / (logits.shape[1] - TOP)
    return classes, kept, others.max(1) + np.log(mean)
