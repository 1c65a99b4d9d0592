"""Records of corruptions at several severities, with one threshold for all or one for each.

    pooled = pool_severities([record_1, record_2, record_3, record_4, record_5])
    accuracy_by_severity(score, pooled, level=0.95)     # mean over the severities

The reference code chooses one threshold for the images of all severities; the paper speaks of a
mean over severities.
"""

from collections.abc import Sequence

import numpy as np
import torch

from demur import metrics
from demur.attacks import Corruption
from demur.attacks.corruption import image_severities
from demur.errors import BadInput
from demur.metrics import FloatArray
from demur.metrics.checks import IntArray
from demur.recipes import VOCABULARY
from demur.runs import Record
from demur.spec import read

PER_IMAGE = ("y", "index", "size_linf", "size_l2", "logits", "aux", "feature", "correct")


def pool_severities(records: Sequence[Record]) -> Record:
    """One record of the images of several; its metadata are those of the first.

    Raises BadInput if they hold different scores.
    """
    first = records[0]
    if any(record.metadata.get("scores") != first.metadata.get("scores") for record in records):
        raise BadInput(f"the records of {first.label} hold different scores; archive them together")
    every = [record.arrays for record in records]
    arrays = {
        name: torch.cat([arrays[name] for arrays in every])
        for name in PER_IMAGE
        if all(name in arrays for arrays in every)
    }
    if "scores" in first.arrays:
        arrays["scores"] = torch.cat([one["scores"] for one in every], 1)
    arrays["severity"] = torch.cat([torch.from_numpy(severities(record)) for record in records])
    return Record(arrays, first.metadata)


def severities(record: Record) -> IntArray:
    """Severity of each image of a record of a corruption, N; BadInput for another attack."""
    if "severity" in record.arrays:
        found: IntArray = record.arrays["severity"].numpy()
        return found
    attack = read(str(record.metadata["spec"]), VOCABULARY)
    if not isinstance(attack, Corruption):
        raise BadInput(f"{record.label} is no corruption and has no severities")
    return image_severities(attack, record.arrays["index"].numpy())


def accuracy_by_severity(score: FloatArray, record: Record, level: float) -> float:
    """Accuracy of accepted images with a threshold for each severity, as a mean over severities."""
    of_image, correct = severities(record), record.correct
    parts = [of_image == severity for severity in np.unique(of_image)]
    return float(
        np.mean([metrics.paper_stats(score[p], correct[p], level).accuracy for p in parts])
    )
