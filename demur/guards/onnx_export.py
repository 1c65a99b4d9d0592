"""A guard as one ONNX file: normalisation, scores and thresholds inside.

The thresholds are an input with default values, so that a program can change them without a new
file. An image with a value outside of [0, 1] is never accepted.
"""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demur.errors import BadInput, import_optional
from demur.files.atomic import write_bytes
from demur.guards.decision import BaseGuard
from demur.output import log_probabilities, prediction
from demur.rejectors import FittedScore
from demur.rejectors.image_scores import image_rejectors
from demur.spec import show

OUTPUTS = ("labels", "accepted", "scores", "probabilities")
OPSET = 18
TOLERANCE = 1e-5
CHECKED = 64  # random images that are compared


class OnnxGuard(nn.Module):
    """Images and thresholds to labels, decisions, scores and class probabilities."""

    def __init__(self, guard: BaseGuard) -> None:
        super().__init__()
        self.guarded = guard.as_model()
        self.parts = [part.score for part in guard.scores]
        self.fitted = nn.ModuleList(s for s in self.parts if isinstance(s, FittedScore))
        self.temperature = guard.temperature

    def forward(self, images: Tensor, thresholds: Tensor) -> tuple[Tensor, ...]:
        out = self.guarded(images)
        scores = torch.stack([_scored(score, out) for score in self.parts], dim=1)  # N, K
        pixels = images.flatten(1)
        in_range = (pixels.amin(1) >= 0) & (pixels.amax(1) <= 1)
        accepted = (scores >= thresholds).all(1) & in_range
        probabilities = log_probabilities(out, self.temperature).exp()
        return prediction(out), accepted, scores, probabilities


def _scored(score: Callable[..., Tensor], out: Any) -> Tensor:
    if isinstance(score, FittedScore):  # without chunks, whose number depends on the batch
        return score.score_chunk(out._replace(feature=out.feature.to(score.dtype))).float()
    return score(out).float()


def export_onnx(guard: BaseGuard, path: Path) -> Path:
    """Write a guard as one ONNX file and check it in onnxruntime; see `Guard.export_onnx`."""
    for one in image_rejectors(*(part.rejector for part in guard.scores)):
        raise BadInput(
            f"{show(one)} sees images and queries the net, which no ONNX file of ours holds; leave "
            "ONNX out, or choose a rejector of the output"
        )
    need = "exporting to ONNX needs onnx, onnxscript and onnxruntime"
    names = ("onnx", "onnxruntime", "onnxscript")  # torch.onnx needs the last
    onnx, runtime, _ = (import_optional(name, need, "'demur[onnx]'") for name in names)
    content = _with_defaults(onnx, _exported(guard), guard)
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # it warns of inputs with defaults, which are intended
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    _check(session, guard)
    write_bytes(path, content)
    return path


def _exported(guard: BaseGuard) -> Any:
    device, module = guard.device, OnnxGuard(guard).eval()
    images = torch.full((2, *guard.shape), 0.5, device=device)
    thresholds = torch.zeros(len(guard.scores), device=device)
    batch = torch.export.Dim("N", min=1)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # it warns that torchvision is not installed
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module, (images, thresholds), dynamo=True, verbose=False, opset_version=OPSET,
                input_names=["images", "thresholds"], output_names=list(OUTPUTS),
                dynamic_shapes=({0: batch}, None), external_data=False,
            )  # fmt: skip
    except Exception as error:  # the exporter raises its own errors for whatever it cannot trace
        first = str(error).strip().partition("\n")[0]
        raise BadInput(f"the model cannot be exported to ONNX: {first[:300]}") from None
    finally:
        logger.setLevel(level)
    assert program is not None
    return program.model_proto


def _with_defaults(onnx: Any, model: Any, guard: BaseGuard) -> bytes:
    """The file with the guard's thresholds as default of the input `thresholds`."""
    values = np.array(guard.thresholds, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, "thresholds"))
    names = {
        "guard": [guard.identity], "class_names": guard.class_names,
        "score_names": [one.name for one in guard.scores],
    }  # fmt: skip
    for key, value in names.items():
        model.metadata_props.add(key=key, value="\n".join(value))
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _check(session: Any, guard: BaseGuard) -> None:
    """Raise BadInput unless onnxruntime agrees with the guard on random images."""
    random = np.random.default_rng(0)
    noise = random.random((CHECKED, *guard.shape), dtype=np.float32)
    levels = random.random((CHECKED, 1, 1, 1), dtype=np.float32)
    x = np.clip(levels + noise * (1 - levels) * (random.random() - 0.5), 0, 1).astype(np.float32)
    x[: CHECKED // 2] = noise[: CHECKED // 2]
    for images in (x, x[:1]):
        compare(session, guard, images)


def compare(session: Any, guard: BaseGuard, images: NDArray[np.float32]) -> None:
    """Raise BadInput unless a session gives the guard's decisions, and its values to 1e-5."""
    expected = guard(torch.from_numpy(images))
    labels, accepted, scores, probabilities = session.run(list(OUTPUTS), {"images": images})
    # a score within the rounding error of its threshold may fall on either side
    margins = np.abs(expected.scores - np.array(guard.thresholds))
    clear = (margins > TOLERANCE * (1 + np.abs(expected.scores))).all(1)
    same = (labels == expected.labels).all() and (accepted == expected.accepted)[clear].all()
    near = all(
        np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        for found, wanted in ((scores, expected.scores), (probabilities, expected.probabilities))
    )
    if not same or not near:
        raise BadInput(
            "onnxruntime computes other values or decisions than the model; export it with "
            "another version of torch or onnxruntime"
        )
