"""The data of the explorer: every image's scores, from which the page's script counts.

Scores and logits are rounded to 32-bit floats, images to 8 bits; the page says so. A run of fifteen
rejectors under five attacks on 10,000 images takes 10 MB; of more images a page holds a sample.
"""

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from demur.evaluate import BASELINE, ORACLE, ScoredRecord, tcon_of, values
from demur.evaluate.certificates import IssuedCertificate, issued_certificates
from demur.evaluate.record_scores import can_score, has_tcon
from demur.evaluate.score import Ranking
from demur.metrics import BoolArray, FloatArray, threshold_at_tpr
from demur.metrics.checks import IntArray, scored_pair
from demur.metrics.thresholds import ANY_SCORE, paper_level_index, score_levels
from demur.noise import uniform
from demur.output import prediction
from demur.rejectors import Con, Coupled, RCon, Rejector, Score
from demur.rejectors.output_scores import AcceptProbability, Rectifier, SoftmaxMargin
from demur.report.scored_runs import NO_DATA, ScoredRun, attacked_images, clean_images
from demur.report.terminal import percent
from demur.runs import Record

MOST_IMAGES = 10_000  # images of a record; the page holds all images of a smaller one
MOST_ROWS, MOST_POINTS = 15_000, 100_000  # of all samples of a page, and of all curves
MOST_CLASSES, TOP_LOGITS = 100, 10  # with more classes, and in a sample, the largest logits
TPR = 0.95
IMAGE_BYTES = 1_500_000  # of all images of a page, before base64
UNIT_SCORES = (Con, RCon, Coupled, Rectifier, AcceptProbability, SoftmaxMargin)  # from 0 to 1
BOUNDS = {"risk": "risk ≤", "tpr": "TPR ≥", "coverage": "coverage ≥"}
SCORES_ONLY = "this record holds scores without logits"

Json = dict[str, Any]
Share = tuple[int, int, int]  # pictures, images of a sample, points of a curve


def explorer_data(runs: Sequence[ScoredRun]) -> Json:
    """Return what the script of the page needs, as JSON values."""
    bytes_per_image = sum(
        (1 + sum("x_adv" in one.record.arrays for one in results.scored if attacked_images(one)))
        * math.prod(results.loaded.run.recipe.data.domain.shape)
        for results in runs
    )
    kept = IMAGE_BYTES // max(1, bytes_per_image)  # images of each run
    records = [len(one.evaluation.scores) + 1 for one in runs for _ in range(len(one.scored) + 1)]
    rows = min(MOST_IMAGES // 2, MOST_ROWS // len(records))
    share = kept, rows, min(2000, MOST_POINTS // sum(records))
    return {"runs": [_run(results, share) for results in runs]}


def _run(results: ScoredRun, share: Share) -> Json:
    recipe = results.loaded.run.recipe
    specs = results.evaluation.scores | recipe.rejectors()
    names = list(results.evaluation.scores)
    labels = _labels(results.scored)
    return {
        "name": results.name,
        "epochs": recipe.epochs,
        "classes": list(recipe.data.class_names),
        "trained": results.loaded.run.trained,
        "training": results.training,
        "level": results.evaluation.level,
        "scores": {name: _score(specs[name]) for name in names}
        | ({ORACLE: {"kind": "tcon", "tau": 1.0, "unit": True}} if names else {}),
        # the clean images that TPR-95 thresholds are chosen on
        "cal": _arrays(results, results.loaded.clean("cal"), share)[0]
        if results.evaluation.thresholds
        else None,
        "certificates": _certificates(results),
        "worst": [  # the highest score of a wrong prediction on each image
            {
                "attack": entry.record.label,
                "rejector": entry.row.rejector,
                "n": len(worst := entry.case.worst[sampled_rows(entry.case.worst)]),
                "worst": packed(worst, "<f4"),
            }
            for entry in results.worst
        ],
        "clean_images": _clean_images(results, share[0]),
        "records": [
            _record(results, entry, label, share)
            for entry, label in zip(results.scored, labels, strict=True)
        ],
    }


def _labels(scored: Sequence[ScoredRecord]) -> list[str]:
    counts = Counter(entry.record.label for entry in scored)
    return [
        entry.record.label
        if counts[entry.record.label] == 1
        else f"{entry.record.label}, n={entry.summary.n} ({entry.record.digest[:6]})"
        for entry in scored
    ]


def _score(rejector: Rejector | Score) -> Json:
    """Return how a score depends on the temperature, and whether it lies between 0 and 1."""
    unit = isinstance(rejector, UNIT_SCORES)
    if isinstance(rejector, Con | RCon):
        kind = "con" if isinstance(rejector, Con) else "rcon"
        return {"kind": kind, "tau": rejector.tau, "unit": unit}
    if isinstance(rejector, Coupled) and (type(rejector.gate), type(rejector.score)) == (Con, RCon):
        return {"kind": "coupled", "gate": rejector.gate_threshold, "unit": unit}
    return {"kind": "fixed", "unit": unit}


def _record(results: ScoredRun, entry: ScoredRecord, label: str, share: Share) -> Json:
    record = entry.record
    arrays, rows = _arrays(results, record, share, {r.rejector: r.ranking for r in entry.rows})
    attacked, reason = _attacked_images(results, record, share[0])
    if "of" in arrays:
        attacked, reason = None, "the page holds a sample of these images"
    return arrays | {
        "attack": label,
        "clean": entry.summary.largest_linf == 0,
        "index": packed(record.arrays["index"].numpy()[rows], "<i4"),
        "attacked": attacked,
        "no_images": reason,
    }


def _arrays(
    results: ScoredRun, record: Record, share: Share, rankings: Mapping[str, Ranking] = {}
) -> tuple[Json, IntArray | slice]:
    evaluation, correct = results.evaluation, record.correct
    scores = {name: evaluation.score_for(name, record) for name in evaluation.scores}
    columns = {name: values(s, record) for name, s in scores.items() if can_score(s, record)}
    columns |= {ORACLE: tcon_of(record)} if has_tcon(record) else {}
    rows = sampled_rows(columns.get(BASELINE, correct.astype(np.float64)), share[1], correct)
    entry: Json = {
        "n": len(correct[rows]),
        "correct": packed(correct[rows], "u1"),
        "y": packed(record.y.numpy()[rows], "<u2"),
        "scores": {name: packed(column[rows], "<f4") for name, column in columns.items()},
        **dict.fromkeys(("predicted", "logits", "a")),
        "no_logits": SCORES_ONLY,
    }
    if len(correct) > MOST_IMAGES:
        exact = {name: exact_curve(one, correct, share[2]) for name, one in columns.items()}
        entry["of"] = len(correct)
        entry["exact"] = {name: _curve(one, rankings.get(name)) for name, one in exact.items()}
    if not record.scores_only:
        out = record.output
        specs = evaluation.scores | results.loaded.run.recipe.rejectors()
        with_a = any(isinstance(specs[name], RCon) for name in evaluation.scores)
        entry |= {
            "predicted": packed(prediction(out).numpy()[rows], "<u2"),
            **_logits(out.logits.numpy()[rows], TOP_LOGITS if "of" in entry else MOST_CLASSES),
            "a": packed(out.aux[:, 0].numpy()[rows], "<f4") if with_a else None,
            "no_logits": "",
        }
    return entry, rows


def _curve(curve: dict[str, NDArray[Any]], ranking: Ranking | None) -> Json:
    """Return a curve, and its AUROC and difference to confidence where the record is scored."""
    made: Json = {name: packed(one, f"<{one.dtype.kind}4") for name, one in curve.items()}
    if ranking is None:
        return made
    made |= {"auroc": ranking.auroc, "interval": [*ranking.auroc_interval]}
    return made | {"gap": [*ranking.auroc_vs_con[:3]]}


def _logits(logits: NDArray[Any], most: int) -> Json:
    """Return the logits, or the largest with their classes if there are more than `most`."""
    if logits.shape[1] <= most:
        return {"logits": packed(logits, "<f4")}
    top, kept, rest = top_logits(logits)
    made = {"logits": packed(kept, "<f4"), "top": packed(top, "<u2"), "rest": packed(rest, "<f4")}
    return made | {"classes": logits.shape[1]}


def _clean_images(results: ScoredRun, kept: int) -> Json | None:
    """Return the first images without attack, if any record stores the attacked ones."""
    stored = [entry.record for entry in results.scored if "x_adv" in entry.record.arrays]
    sampled = any(len(entry.record.y) > MOST_IMAGES for entry in results.scored)
    if sampled or not stored or not results.split_sizes:
        return None
    fullest = max(stored, key=lambda record: len(record.arrays["x_adv"]))
    count = min(kept, len(fullest.arrays["x_adv"]))
    if count == 0:
        return None
    pixels = clean_images(fullest, results.loaded).first(count).batch(slice(None))[0].numpy()
    return {"count": count, "shape": list(pixels.shape[1:]), "pixels": _bytes(pixels)}


def _attacked_images(results: ScoredRun, record: Record, kept: int) -> tuple[Json | None, str]:
    if "x_adv" not in record.arrays:
        return None, "the record stores no images; demur attack --keep-images 256 does"
    if not results.split_sizes:
        return None, NO_DATA
    clean_images(record, results.loaded)  # raises if the data have changed
    if not record.arrays["size_linf"].any():
        return None, ""  # the clean images themselves
    pixels = record.arrays["x_adv"][:kept].numpy()
    return {"count": len(pixels), "pixels": _bytes(pixels)}, ""


def _certificates(results: ScoredRun) -> list[Json]:
    """Return the certificates whose rejector is scored here with the same spec."""
    if not results.scored:
        return []
    evaluation = results.evaluation
    return [
        _certificate(made)
        for made in issued_certificates(results.loaded.run)
        if made.rejector in evaluation.scores
        and evaluation.texts[made.rejector] == made.metadata["rejector_spec"]
    ]


def _certificate(made: IssuedCertificate) -> Json:
    about = made.metadata
    under = "" if about["on"] == "clean" else f" under {about['on']}"
    bound = f"{BOUNDS[about['quantity']]} {percent(float(about['level']))}%"
    return {
        "rejector": made.rejector,
        "thresholds": [t if t > ANY_SCORE else None for t in made.thresholds],
        "label": f"{bound}{under}, {made.rejector}",
        "sentence": f"{about['sentence']}; valid for {about['valid_for']}",
    }


def _bytes(pixels: ArrayLike) -> str:
    return packed(np.round(np.clip(pixels, 0, 1) * 255), "u1")


def packed(array: ArrayLike, dtype: str) -> str:
    """Return an array as base64 of little-endian numbers."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def sampled_rows(
    score: FloatArray, count: int = MOST_IMAGES, correct: BoolArray | None = None
) -> IntArray | slice:
    """Rows of the images of a page: all up to MOST_IMAGES, else `count`, ascending.

    The images, ordered by correctness and score, are cut into `count` equal parts. One image of
    each is drawn by its number, so that the same record gives the same sample.
    """
    if len(score) <= MOST_IMAGES:
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
    """Classes and values of the largest logits (N, TOP_LOGITS), and one logit for all others (N).

    It spreads their mass evenly, so that the softmax at temperature 1 is exact.
    """
    classes = np.argpartition(-logits, TOP_LOGITS, axis=1)[:, :TOP_LOGITS]
    others = logits.astype(np.float64)
    kept = np.take_along_axis(others, classes, 1)
    np.put_along_axis(others, classes, -np.inf, 1)
    mean = np.exp(others - others.max(1, keepdims=True)).sum(1) / (logits.shape[1] - TOP_LOGITS)
    return classes, kept, others.max(1) + np.log(mean)
