"""A guard: a classifier with a calibrated rule that accepts or rejects each prediction.

guard = demur.guard(model, x_cal, y_cal, tpr=0.95)
result = guard(["cat.png", "dog.png"])
result.labels, result.accepted, result.reasons
guard.save("bundle"), demur.Guard.load("bundle")
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demur.attacks.attack_model import Model
from demur.files.image_files import MAX_PIXELS
from demur.guards.calibration import GuardScore
from demur.guards.inputs import Shape, read_images
from demur.methods import Head
from demur.nets import NetSpec
from demur.nets.net import LogitsOnly
from demur.output import Output, as_output, log_probabilities, prediction
from demur.rejectors.rule import Rule

if TYPE_CHECKING:
    from demur.evaluate import LoadedRun
    from demur.runs import Run

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
        >>> result = guard(net, x, y, class_names=["cat", "dog"])(x[:3])
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
class Guard:
    """A classifier with a calibrated rule that accepts or rejects each prediction.

    Make one with `demur.guard`, `Guard.from_run` or `Guard.load`.

    Attributes:
        model: Images N, C, H, W in [0, 1] to logits or an Output.
        scores: The scores with their thresholds; accepted where all scores reach theirs.
        shape: C, H, W of the images.
        class_names: Name of each class.
        temperature: Softmax temperature of the class probabilities.
        resize: Whether images of another size are resized; otherwise they raise BadInput.
        mean: Mean of each channel that is subtracted before the model, or None.
        std: Standard deviation of each channel that is divided by before the model, or None.
        calibration: How the thresholds were chosen, and figures on the calibration images.
        figures: Figures on other images, such as attacked ones, for the model card.
        eps: Linf radius at which the service's page attacks an image.
        built_from: The specs that rebuild the model, or None for a foreign one.

    Example:
        >>> import torch
        >>> from demur import guard
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> x, y = torch.rand(200, 1, 8, 8), torch.arange(200) % 10
        >>> guarded = guard(net, x, y, tpr=0.9)
        >>> guarded(x[:5]).accepted.shape
        (5,)
    """

    model: Model
    scores: tuple[GuardScore, ...]
    shape: Shape
    class_names: tuple[str, ...]
    temperature: float = 1.0
    resize: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    calibration: dict[str, Any] = field(default_factory=dict)
    figures: tuple[dict[str, Any], ...] = ()
    eps: float = 8 / 255
    built_from: BuiltFrom | None = None

    def __repr__(self) -> str:
        names = " and ".join(f"{s.name} >= {s.threshold:.6g}" for s in self.scores)
        return f"Guard({len(self.class_names)} classes, images {self.shape}, accepts {names})"

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
        thresholds = np.array([score.threshold for score in self.scores])
        accepted = (scores >= thresholds).all(1) & np.isfinite(probabilities).all(1)
        notes = notes or ("",) * len(x)
        reasons = tuple(
            self._reason(bool(accept), values, note)
            for accept, values, note in zip(accepted, scores.tolist(), notes, strict=True)
        )
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
        shown = pairs if accepted else failed
        sign = ">=" if accepted else "<"
        texts = [
            f"{part.name} {' '.join(_distinct(value, sign, part.threshold))}"
            for part, value in shown
        ]
        if any(math.isnan(value) for _, value in failed):
            texts = ["a score is not a number"]
        reason = f"{'accepted' if accepted else 'rejected'}: {' and '.join(texts)}"
        return f"{reason}; {note}" if note else reason

    def output(self, x: Tensor) -> Output:
        """Return the output for a batch N, C, H, W in [0, 1] on the model's device."""
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
        """Threshold of each score."""
        return tuple(part.threshold for part in self.scores)

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The certificate of the thresholds as JSON values; None if they are not certified."""
        certificate: dict[str, Any] | None = self.calibration.get("certificate")
        return certificate

    def as_model(self) -> nn.Module:
        """Return a module from images in [0, 1] to an Output, for the attacks of demur."""
        return GuardedModel(self)

    def classifier(self) -> nn.Module:
        """Return a module from images in [0, 1] to logits, for other attack libraries."""
        return LogitsOnly(self.as_model())

    def save(self, folder: str | Path, *, factory: str | None = None, onnx: bool = False) -> Path:
        """Write the guard to a folder in the layout of the Hugging Face Hub.

        Args:
            folder: A new folder, or one that holds a guard, which is replaced.
            factory: "module:function" that returns a module like the model without its weights;
                needed for a model that demur did not build, unless `Guard.load` is given one.
            onnx: Whether the folder also holds model.onnx.

        Returns:
            The folder: model.safetensors, config.json and the model card README.md.
        """
        from demur.guards.bundle import save

        return save(self, Path(folder), factory, onnx)

    @staticmethod
    def load(folder: str | Path, *, model: nn.Module | None = None, device: str = "cpu") -> "Guard":
        """Read a guard from a folder, without pickle and without code from the folder.

        Args:
            folder: A folder that `save` wrote.
            model: A module that the weights are loaded into; needed for a foreign model that was
                saved without a factory.
            device: Device of the model: auto, cpu, cuda or cuda:N.

        Returns:
            The guard. BadInput is raised if a file is missing, changed or does not fit.
        """
        from demur.guards.bundle import load

        return load(Path(folder), model, device)

    @staticmethod
    def from_run(
        run: "Run | LoadedRun | str | Path",
        *,
        rejector: str | None = None,
        tpr: float | None = None,
        coverage: float | None = None,
        risk: float | None = None,
        confidence: float = 0.95,
        class_names: Sequence[str] | None = None,
        resize: bool | None = None,
        device: str = "auto",
        data_folder: Path | None = None,
    ) -> "Guard":
        """Make a guard from a trained run, calibrated on the clean cal images of its data set.

        Args:
            run: A run, or its name or folder.
            rejector: A rejector of the run; None takes the head's, or Con without a head.
            tpr: Accept at least this share of the correct predictions; the default, with 0.95.
            coverage: Accept at least this share of all images.
            risk: Accept at most this share of errors among the accepted.
            confidence: Confidence of the guarantee.
            class_names: Names of the classes; None takes those of the data set.
            resize: Whether to resize images of another size; None does what the data set did.
            device: Device of the model: auto, cpu, cuda or cuda:N.
            data_folder: Folder of the data set.

        Returns:
            The guard, whose model card has the figures of the run's records.
        """
        from demur.guards.build import guard_of_run

        return guard_of_run(
            run, rejector, (tpr, coverage, risk), confidence, class_names, resize, device,
            data_folder,
        )  # fmt: skip

    def save_pretrained(
        self, folder: str | Path, *, repo_id: str | None = None, push_to_hub: bool = False
    ) -> Path:
        """Write the guard to a folder, and to the Hugging Face Hub if asked.

        Args:
            folder: As for `save`.
            repo_id: "owner/name" on the Hub; None takes the name of the folder.
            push_to_hub: Also upload the folder; needs huggingface_hub and a login.

        Returns:
            The folder.
        """
        from demur.guards.hub import save_pretrained

        return save_pretrained(self, Path(folder), repo_id, push_to_hub)

    @staticmethod
    def from_pretrained(
        name: str | Path,
        *,
        revision: str | None = None,
        model: nn.Module | None = None,
        device: str = "cpu",
    ) -> "Guard":
        """Read a guard from a folder or from the Hugging Face Hub.

        Args:
            name: A folder, or "owner/name" on the Hub, which needs huggingface_hub.
            revision: Branch, tag or commit on the Hub.
            model: As for `load`.
            device: As for `load`.

        Returns:
            The guard, as `load` reads it: no code of the folder runs.
        """
        from demur.guards.hub import from_pretrained

        return from_pretrained(str(name), revision, model, device)

    def export_onnx(self, path: str | Path) -> Path:
        """Write the guard as one ONNX file and check it in onnxruntime.

        The file normalises, scores and decides. Its input is `images` (N, C, H, W in [0, 1]); the
        input `thresholds` has the guard's thresholds as default. Its outputs are `labels`,
        `accepted`, `scores` and `probabilities`.

        Args:
            path: The file to write.

        Returns:
            The path. BadInput is raised if the model cannot be exported, or if onnxruntime
            disagrees by more than 1e-5 or in one decision.
        """
        from demur.guards.onnx_export import export_onnx

        return export_onnx(self, Path(path))


class GuardedModel(nn.Module):
    """A guard's model with its normalisation: images in [0, 1] to an Output."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard
        if isinstance(guard.model, nn.Module):
            self.model = guard.model
            self.training = guard.model.training

    def forward(self, x: Tensor) -> Output:
        return self.guard.output(x)


def _per_channel(values: tuple[float, ...], x: Tensor) -> Tensor:
    return torch.tensor(values, dtype=x.dtype, device=x.device).view(-1, 1, 1)


def _distinct(value: float, sign: str, threshold: float) -> tuple[str, str, str]:
    """Return both numbers with enough digits to tell them apart."""
    for digits in (4, 6, 9, 17):
        texts = f"{value:.{digits}g}", f"{threshold:.{digits}g}"
        if texts[0] != texts[1] or value == threshold:
            break
    return texts[0], sign, texts[1]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
