"""The data of the explorer: every image's scores, from which the page's script counts.

Scores and logits are rounded to 32-bit floats, images to 8 bits; the page says so. A run of fifteen
rejectors under five attacks on 10,000 images takes 10 MB.
"""

import base64
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from demur.evaluate import ORACLE, ScoredRecord, tcon_of, values
from demur.evaluate.certificates import IssuedCertificate, issued_certificates
from demur.evaluate.record_scores import can_score, has_tcon
from demur.metrics.thresholds import ANY_SCORE
from demur.output import prediction
from demur.rejectors import Con, Coupled, RCon, Rejector, Score
from demur.rejectors.output_scores import AcceptProbability, Rectifier, SoftmaxMargin
from demur.report.scored_runs import NO_DATA, ScoredRun, attacked_images, clean_images
from demur.report.terminal import percent
from demur.runs import Record

IMAGE_BYTES = 1_500_000  # of all images of a page, before base64
UNIT_SCORES = (Con, RCon, Coupled, Rectifier, AcceptProbability, SoftmaxMargin)  # from 0 to 1
BOUNDS = {"risk": "risk ≤", "tpr": "TPR ≥", "coverage": "coverage ≥"}
SCORES_ONLY = "this record holds scores without logits"

Json = dict[str, Any]


def explorer_data(runs: Sequence[ScoredRun]) -> Json:
    """Return what the script of the page needs, as JSON values."""
    bytes_per_image = sum(
        (1 + sum("x_adv" in one.record.arrays for one in results.scored if attacked_images(one)))
        * math.prod(results.loaded.run.recipe.data.domain.shape)
        for results in runs
    )
    kept = IMAGE_BYTES // max(1, bytes_per_image)  # images of each run
    return {"runs": [_run(results, kept) for results in runs]}


def _run(results: ScoredRun, kept: int) -> Json:
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
        "cal": _arrays(results, results.loaded.clean("cal"))
        if results.evaluation.thresholds
        else None,
        "certificates": _certificates(results),
        "worst": [  # the highest score of a wrong prediction on each image
            {
                "attack": entry.record.label,
                "rejector": entry.row.rejector,
                "n": entry.row.n,
                "worst": packed(entry.case.worst, "<f4"),
            }
            for entry in results.worst
        ],
        "clean_images": _clean_images(results, kept),
        "records": [
            _record(results, entry, label, kept)
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


def _record(results: ScoredRun, entry: ScoredRecord, label: str, kept: int) -> Json:
    record = entry.record
    attacked, reason = _attacked_images(results, record, kept)
    return _arrays(results, record) | {
        "attack": label,
        "clean": entry.summary.largest_linf == 0,
        "index": packed(record.arrays["index"].numpy(), "<i4"),
        "attacked": attacked,
        "no_images": reason,
    }


def _arrays(results: ScoredRun, record: Record) -> Json:
    evaluation = results.evaluation
    scores = {name: evaluation.score_for(name, record) for name in evaluation.scores}
    columns = {name: values(s, record) for name, s in scores.items() if can_score(s, record)}
    columns |= {ORACLE: tcon_of(record)} if has_tcon(record) else {}
    entry: Json = {
        "n": len(record.y),
        "correct": packed(record.correct, "u1"),
        "y": packed(record.y.numpy(), "<u2"),
        "scores": {name: packed(column, "<f4") for name, column in columns.items()},
        "predicted": None,
        "logits": None,
        "a": None,
        "no_logits": SCORES_ONLY,
    }
    if not record.scores_only:
        out = record.output
        specs = evaluation.scores | results.loaded.run.recipe.rejectors()
        with_a = any(isinstance(specs[name], RCon) for name in evaluation.scores)
        entry |= {
            "predicted": packed(prediction(out).numpy(), "<u2"),
            "logits": packed(out.logits.numpy(), "<f4"),
            "a": packed(out.aux[:, 0].numpy(), "<f4") if with_a else None,
            "no_logits": "",
        }
    return entry


def _clean_images(results: ScoredRun, kept: int) -> Json | None:
    """Return the first images without attack, if any record stores the attacked ones."""
    stored = [entry.record for entry in results.scored if "x_adv" in entry.record.arrays]
    if not stored or not results.split_sizes:
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
