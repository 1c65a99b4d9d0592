"""A guard over time: what it is, how two differ, and new thresholds from new images.

Going back to an older guard is serving its folder again.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import warn

import torch

from demur.data.sources import FolderSource
from demur.errors import BadInput
from demur.files.checked_files import tensor_digest
from demur.guards.calibration import calibrate, guarantee_of, on_device
from demur.guards.core import Guard, outputs_of
from demur.guards.inputs import image_digests, read_images
from demur.output import Output, prediction
from demur.recipes import VOCABULARY
from demur.rejectors import Coupled, ImageRejector
from demur.rejectors.rule import as_score
from demur.spec import read, show


def describe(guard: Guard) -> dict[str, str]:
    """Return what a guard is and what is known of it, as text by name."""
    channels, height, width = guard.shape
    figures = guard.calibration

    def rate(name: str) -> str:
        found = figures.get(name)
        return f"{found['value']:.1%} of {found['n']}" if found else "unknown"

    tensors = guard.model.state_dict() if isinstance(guard.model, torch.nn.Module) else None
    built = [show(spec) for spec in guard.built_from or ()] or ["made outside of demur"]
    attacked = [
        f"{one['attack']} {one['risk']['value']:.1%} of {one['risk']['n']}"
        for one in guard.reported_rates
        if one["risk"]
    ]
    return {
        "name": guard.name, "version": str(guard.version), "digest": guard.digest,
        "weights": tensor_digest(tensors).hex() if tensors is not None else "-",
        "net": ", ".join(built),
        "images": f"{channels} x {height} x {width}{', resized' if guard.resize else ''}",
        "classes": ", ".join(guard.class_names), "accepts": guard.rule_text,
        "guarantee": guard.guarantee_text, "without a guarantee": figures["shortfall"] or "no",
        "calibration images": str(figures["images"]),
        "accuracy": rate("accuracy"), "coverage": rate("coverage"),
        "wrong among the accepted": rate("risk"),
        "wrong among the accepted of the test images": "; ".join(attacked) or "unknown",
        "chance": figures.get("chance_test", {}).get("sentence", "unknown"),
    }  # fmt: skip


def differences(first: Guard, second: Guard) -> dict[str, tuple[str, str]]:
    """Return what differs between two guards: both texts by name."""
    a, b = describe(first), describe(second)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def recalibrated(
    guard: Guard, images: Any, labels: Any, *, tpr: float | None = None,
    coverage: float | None = None, risk: float | None = None, confidence: float = 0.95,
    accept_chance: bool = False,
) -> Guard:  # fmt: skip
    """Return the guard of the next version, with thresholds chosen on other images.

    The net and fitted scores stay as they are. The figures of test images are left out, since
    they are of the old thresholds. Images, labels and guarantees are those of `demur.guard`; if no
    guarantee is given it is that of the guard.

    Uncertified is raised if a risk cannot be certified. BadInput is raised for training images of
    the guard's run, and for a guarantee under attack, which clean images do not give again.
    """
    if under := (guard.certificate or {}).get("under"):
        raise BadInput(
            f"this guard's guarantee holds under {under}, and recalibration is on clean images; "
            "make a guard of the run again with demur export --under"
        )
    x = read_images(images, guard.shape, resize=False).x
    check_not_trained_on(guard, x, [f"image {i}" for i in range(len(x))])
    out, y = outputs_of(guard, x, labels)
    scores = [
        part.rejector if isinstance(part.rejector, ImageRejector) else part.score
        for part in guard.scores
    ]
    spec, fitted = guard.scores[-1].rejector, as_score(scores[-1])
    if len(scores) == 2:
        gate_threshold = guard.thresholds[0]
        spec = Coupled(guard.scores[0].rejector, gate_threshold, spec)
        fitted = Coupled(scores[0], gate_threshold, fitted)
    guarantee = guarantee_of(tpr, coverage, risk)
    if (tpr, coverage, risk) == (None, None, None):
        guarantee = read(str(guard.calibration["guarantee"]), VOCABULARY)
        confidence = guard.calibration["confidence"]
    _warn_of_labels(guard, out, y)
    found = calibrate(spec, fitted, out, y, guarantee, confidence, accept_chance=accept_chance)
    absent = [name for i, name in enumerate(guard.class_names) if i not in y]
    return replace(
        guard, scores=on_device(found.scores, guard.device),
        calibration=found.figures | ({"classes_without_images": absent} if absent else {}),
        reported_rates=(), version=guard.version + 1,
    )  # fmt: skip


def _warn_of_labels(guard: Guard, out: Output, y: torch.Tensor) -> None:
    """Warn of classes whose images are predicted most often as one other class."""
    for label, name in enumerate(guard.class_names):
        own = prediction(out)[y == label]
        if len(own) and (other := int(own.mode().values)) != label and (own == other).sum() > 4:
            share = f"{int((own == other).sum())} of {len(own)} images of {name}"
            predicted = f"are predicted as {guard.class_names[other]}; check their labels"
            warn(f"{share} {predicted}", stacklevel=3)


def labelled_images(guard: Guard, folder: Path) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return the images of a folder per class, their labels, and why files were left out."""
    source = FolderSource(folder)
    if unknown := sorted({one.label for one in source.entries} - set(guard.class_names)):
        known = ", ".join(guard.class_names[:8])
        raise BadInput(
            f"{folder}: {unknown[0]!r} is no class of the guard; name a folder with one folder per "
            f"class, such as {known}"
        )
    x, y, names, problems = list[torch.Tensor](), list[int](), list[str](), list[str]()
    for path, entry in zip(source.paths, source.entries, strict=True):
        try:
            x.append(read_images(path, guard.shape, guard.resize).x)
            y.append(guard.class_names.index(entry.label))
            names.append(str(path))
        except (BadInput, OSError) as error:
            problems.append(str(error))
    if not x:
        raise BadInput(f"{folder}: no image could be read; {problems[0]}")
    check_not_trained_on(guard, torch.cat(x), names)
    return torch.cat(x), torch.tensor(y), problems


def check_not_trained_on(guard: Guard, x: torch.Tensor, names: Sequence[str]) -> None:
    """Raise BadInput if images N, C, H, W trained the net; a guard that has no digests passes."""
    known = torch.empty(0) if guard.training_images is None else guard.training_images
    if len(seen := torch.isin(image_digests(x), known).nonzero()):
        raise BadInput(
            f"{len(seen)} of {len(x)} images were used in training, such as {names[int(seen[0])]}; "
            "leave them out (data.csv of a run on a folder lists fit and val images)"
        )
