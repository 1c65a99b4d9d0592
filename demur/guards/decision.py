"""How a guard decides: the model, the scores with their thresholds, and the result for images.

`Guard` in core.py is this class with its constructors and files. What reads, writes and exports
guards imports this file alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demur.attacks.attack_model import Model
from demur.attacks.wrappers import WrappedModel
from demur.errors import shorten
from demur.files.checked_files import tensor_digest
from demur.files.image_files import MAX_PIXELS
from demur.guards.calibration import GuardScore
from demur.guards.inputs import Shape, read_images
from demur.methods import Head
from demur.metrics.thresholds import ANY_SCORE
from demur.nets import NetSpec
from demur.nets.net import LogitsOnly
from demur.output import Output, as_output, log_probabilities, prediction
from demur.rejectors.image_scores import (
    ImageColumn,
    add_columns,
    image_rejectors,
    values_on_images,
    with_columns,
)
from demur.rejectors.rule import FittedScore, Rule
from demur.spec import show

BATCH_SIZE = 256


@dataclass(frozen=True)
class GuardResult:
    """Predictions of a guard and its decisions, as NumPy arrays.

    Attributes:
        labels: Predicted class of each image, N.
        accepted: Whether each prediction is accepted, N.
        scores: Scores of each image, one column per score, N, K.
        reasons: Why each prediction was accepted or rejected, one sentence per image.
        probabilities: Class probabilities, N, C.
        score_names: Name of each score, K.
        class_names: Name of each class, C.

    Example:
        >>> import torch
        >>> from demur import guard
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        >>> x, y = torch.rand(200, 1, 8, 8), torch.arange(200) % 2
        >>> result = guard(net, x, y, accept_chance=True)(x[:3])
        >>> len(result.rows())
        3
    """

    labels: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    scores: NDArray[np.float64]
    reasons: tuple[str, ...]
    probabilities: NDArray[np.float64]
    score_names: tuple[str, ...]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary of JSON values per image; infinite scores are None."""
        return [
            {
                "label": int(label),
                "class": self.class_names[label],
                "accepted": bool(self.accepted[i]),
                "confidence": _number(self.probabilities[i, label]),
                "scores": {
                    name: _number(value)
                    for name, value in zip(self.score_names, self.scores[i], strict=True)
                },
                "reason": self.reasons[i],
            }
            for i, label in enumerate(self.labels)
        ]


class BuiltFrom(NamedTuple):
    """The specs that a net was built from."""

    net: NetSpec
    head: Head


@dataclass(frozen=True)
class BaseGuard:
    """The parts of a guard and how it decides; `demur.Guard` adds how it is made and stored."""

    model: Model
    scores: tuple[GuardScore, ...]
    shape: Shape
    class_names: tuple[str, ...]
    temperature: float = 1.0
    resize: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    calibration: dict[str, Any] = field(default_factory=dict)
    reported_rates: tuple[dict[str, Any], ...] = ()
    eps: float = 8 / 255
    built_from: BuiltFrom | None = None
    name: str = "guard"
    version: int = 1
    training_images: Tensor | None = field(default=None, compare=False)  # of `image_digests`

    def __post_init__(self) -> None:
        specs, rejectors = with_columns(tuple(part.rejector for part in self.scores))
        if rejectors:  # `output` has their values as columns
            own = zip(self.scores, specs, strict=True)
            bound = (p._replace(score=s) if isinstance(s, ImageColumn) else p for p, s in own)
            object.__setattr__(self, "scores", tuple(bound))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what decides: weights, scores, thresholds, preprocessing, class names."""
        tensors = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        fitted = [part.score for part in self.scores if isinstance(part.score, FittedScore)]
        for number, score in enumerate(fitted):
            tensors |= {f"{number}.{name}": value for name, value in score.named_buffers()}
        rule = [(show(part.rejector, full=True), part.threshold) for part in self.scores]
        text = repr((
            self.shape, self.class_names, self.temperature, self.resize, self.mean, self.std, rule,
        ))  # fmt: skip
        return tensor_digest(tensors, text).hex()

    @property
    def identity(self) -> str:
        """Name, version and the first digits of the digest."""
        return f"{self.name} {self.version} ({self.digest[:12]})"

    @property
    def rule_text(self) -> str:
        """The scores with their thresholds."""
        parts = self.scores
        shown = (f"{p.name} >= {p.threshold:.6g}" if p.rejects else f"any {p.name}" for p in parts)
        return " and ".join(shown) + self._rejects_nothing

    @property
    def _rejects_nothing(self) -> str:
        return "" if any(part.rejects for part in self.scores) else ", so it rejects nothing"

    @property
    def guarantee_text(self) -> str:
        """How the thresholds were chosen, and what a reader may overlook about it."""
        absent = ", ".join(self.calibration.get("classes_without_images", ()))
        end = f"; no image was of the class {shorten(absent)}" if absent else ""
        return f"{self.calibration['sentence']}{self._rejects_nothing}{end}"

    @property
    def summary(self) -> str:
        """Accuracy beside chance; coverage and errors of the calibration images."""
        accuracy = self.calibration.get("chance_test", {}).get("sentence", "Accuracy unknown")
        coverage = (self.calibration.get("coverage") or {"value": 1.0})["value"]
        risk = self.calibration.get("risk")
        wrong = f"; {risk['value']:.1%} of these are wrong" if risk else ""
        return f"{accuracy}. It accepts {coverage:.1%} of the calibration images{wrong}."

    def __repr__(self) -> str:
        shown = f"{len(self.class_names)} classes, images {self.shape}, accepts {self.rule_text}"
        return f"Guard({shown})"

    def __call__(
        self, images: Any, batch_size: int = BATCH_SIZE, max_pixels: int = MAX_PIXELS
    ) -> GuardResult:
        """Classify images and accept or reject each prediction.

        Args:
            images: One or several Pillow images, paths, arrays (H, W, C or N, H, W, C) or tensors
                (C, H, W or N, C, H, W); arrays and tensors hold uint8 values or floats in [0, 1].
            batch_size: Images per forward pass.
            max_pixels: The largest number of pixels of a file that is decoded.

        Returns:
            The result. BadInput is raised for an image that is damaged, out of range, or of
            another size if the guard does not resize.
        """
        batch = read_images(images, self.shape, self.resize, max_pixels)
        return self.decide(batch.x, batch.notes, batch_size)

    def decide(
        self, x: Tensor, notes: Sequence[str] = (), batch_size: int = BATCH_SIZE
    ) -> GuardResult:
        """Return the result for a batch N, C, H, W of floats in [0, 1] that is already checked."""
        parts = [self._decide_part(part) for part in x.split(batch_size)]
        labels, probabilities, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
        accepted = (scores >= np.array(self.thresholds)).all(1) & np.isfinite(probabilities).all(1)
        each = zip(accepted.tolist(), scores.tolist(), notes or ("",) * len(x), strict=True)
        reasons = tuple(self._reason(*one) for one in each)
        names = tuple(score.name for score in self.scores)
        return GuardResult(
            labels, accepted, scores, reasons, probabilities, names, self.class_names
        )

    def _decide_part(self, x: Tensor) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Labels (N), class probabilities (N, C) and scores (N, K) of one batch."""
        with torch.no_grad():
            out = self.output(x.to(self.device))
            probabilities = log_probabilities(out, self.temperature).exp()
            scores = torch.stack([part.score(out).double() for part in self.scores], dim=1)
        arrays = [part.cpu().numpy() for part in (prediction(out), probabilities.double(), scores)]
        return arrays[0], arrays[1], arrays[2]

    def _reason(self, accepted: bool, values: list[float], note: str) -> str:
        pairs = list(zip(self.scores, values, strict=True))
        failed = [(part, value) for part, value in pairs if not value >= part.threshold]
        if not accepted and not failed:
            return "rejected: the output of the net is not a number"
        decision, sign, shown = ("accepted", ">=", pairs) if accepted else ("rejected", "<", failed)
        texts = [f"{part.name} {_compared(value, sign, part.threshold)}" for part, value in shown]
        if any(math.isnan(value) for _, value in failed):
            texts = ["a score is not a number"]
        reason = f"{decision}: {' and '.join(texts)}"
        return f"{reason}; {note}" if note else reason

    def output(self, x: Tensor) -> Output:
        """Return the output for a batch N, C, H, W in [0, 1] on the model's device."""
        out = self.net_output(x)
        rejectors = image_rejectors(*(part.rejector for part in self.scores))
        columns = [values_on_images(one, self.net_output, x, out) for one in rejectors]
        return add_columns(out, columns)

    def net_output(self, x: Tensor) -> Output:
        """Return the output of the net, without the scores of image rejectors."""
        if self.mean is not None and self.std is not None:
            x = (x - _per_channel(self.mean, x)) / _per_channel(self.std, x)
        rows = None if torch.compiler.is_exporting() else len(x)
        return as_output(self.model(x), rows)

    @property
    def device(self) -> torch.device:
        """Device of the model; the CPU if it has no weights."""
        tensors = self.model.parameters() if isinstance(self.model, nn.Module) else iter(())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def rule(self) -> Rule:
        """The scores with their thresholds as a rule, for criteria and attacks."""
        return Rule(tuple((part.score, part.threshold) for part in self.scores))

    @property
    def thresholds(self) -> tuple[float, ...]:
        return tuple(part.threshold for part in self.scores)

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The certificate of the thresholds as JSON values; None if they are not certified."""
        return self.calibration.get("certificate")

    def as_model(self) -> nn.Module:
        """Return a module from images in [0, 1] to an Output, for the attacks of demur."""
        return GuardedModel(self)

    def classifier(self) -> nn.Module:
        """Return a module from images in [0, 1] to logits, for other attack libraries."""
        return LogitsOnly(self.as_model())


class GuardedModel(WrappedModel):
    """A guard's model with its normalisation: images in [0, 1] to an Output."""

    def __init__(self, guard: BaseGuard) -> None:
        super().__init__(guard.model)
        self.guard = guard

    def forward(self, x: Tensor) -> Output:
        return self.guard.output(x)


def _per_channel(values: tuple[float, ...], x: Tensor) -> Tensor:
    return torch.tensor(values, dtype=x.dtype, device=x.device).view(-1, 1, 1)


def _compared(value: float, sign: str, threshold: float) -> str:
    """Return a score and its threshold with enough digits to tell them apart."""
    for digits in (4, 6, 9, 17):
        left, right = f"{value:.{digits}g}", f"{threshold:.{digits}g}"
        if left != right or value == threshold:
            break
    if threshold <= ANY_SCORE:
        return f"{left} (no threshold)"
    return f"{left} {sign} {right}"


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
