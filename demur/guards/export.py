"""A guard as one ONNX file, as a repository of NVIDIA Triton, and its model card.

The ONNX file holds normalisation, scores and thresholds. The thresholds are an input with default
values, so that a program can change them without a new file. An image with a value outside of
[0, 1] is never accepted. The repository, which KServe reads too, holds NAME/config.pbtxt,
NAME/labels.txt and NAME/VERSION/model.onnx with the decision rule; Triton batches by itself. The
card is what the README.md of the guard's folder says, as the Hub shows it.
"""

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demur.errors import BadInput, import_optional, visible
from demur.files.checked_files import replace_folder, write_bytes, write_text
from demur.guards.decision import BaseGuard
from demur.output import log_probabilities, prediction
from demur.rejectors import FittedScore
from demur.rejectors.image_scores import image_rejectors
from demur.spec import show
from demur.spec.code_digest import code_of

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


MAX_BATCH = 64
CONFIG = """\
name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: {batch}
dynamic_batching {{ }}
input [
  {{ name: "images" data_type: TYPE_FP32 dims: [ {shape} ] }}
]
output [
  {{ name: "labels" data_type: TYPE_INT64 dims: [ 1 ] reshape {{ shape: [ ] }} }},
  {{ name: "accepted" data_type: TYPE_BOOL dims: [ 1 ] reshape {{ shape: [ ] }} }},
  {{ name: "scores" data_type: TYPE_FP32 dims: [ {scores} ] }},
  {{ name: "probabilities" data_type: TYPE_FP32 dims: [ {classes} ] label_filename: "labels.txt" }}
]
parameters {{ key: "guard" value {{ string_value: "{identity}" }} }}
"""


def export_triton(guard: BaseGuard, folder: Path) -> Path:
    """Write a guard as a repository in a new folder, check its ONNX file, return its folder."""
    if folder.exists():
        raise BadInput(f"{folder} exists; name a new folder for the model repository")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", guard.name)
    with replace_folder(folder) as (half, _):
        model = half / name
        (model / str(guard.version)).mkdir(parents=True)
        export_onnx(guard, model / str(guard.version) / "model.onnx")
        write_text(model / "labels.txt", "".join(f"{one}\n" for one in guard.class_names))
        config = CONFIG.format(
            name=name, batch=MAX_BATCH, shape=", ".join(map(str, guard.shape)),
            scores=len(guard.scores), classes=len(guard.class_names),
            identity=re.sub(r"[^ -~]|[\"\\]", "_", guard.identity),
        )  # fmt: skip
        write_text(model / "config.pbtxt", config)
    return folder / name


MOST_CLASSES = 20  # that the card lists


def _plain(text: str) -> str:
    """A name that markdown shows as it is: no HTML, no link, no new line."""
    return re.sub(r"([\\`\[\]<>|])", r"\\\1", visible(" ".join(text.split())))


def _code(text: str) -> str:
    """A name as code, which a backtick would end."""
    return f"`{visible(' '.join(text.split())).replace('`', chr(39))}`"


def model_card(guard: BaseGuard, factory: str | None) -> str:
    """Return the model card as markdown with YAML front matter."""
    tags = ["image-classification", "selective-classification", "adversarial-robustness", "demur"]
    return "\n".join([
        "---", "library_name: demur", "pipeline_tag: image-classification", "tags:",
        *(f"- {tag}" for tag in tags), "---", "",
        "# Image classifier that rejects inputs", "",
        f"A classifier of {len(guard.class_names)} classes with a rejection rule, calibrated and "
        "saved by demur.", "",
        *_usage(guard, factory), "",
        *_inputs(guard), "",
        *_rule(guard), "",
        *_figures(guard), "",
        *_limits(guard), "",
    ])  # fmt: skip


def _usage(guard: BaseGuard, factory: str | None) -> list[str]:
    given = "" if guard.built_from is not None or factory else ", model=model"
    lines = ["## Use", "", "```python", "from demur import Guard", ""]
    lines += [f'guard = Guard.load("."{given})', 'result = guard(["image.png"])']
    lines += ["result.labels, result.accepted, result.reasons", "```"]
    code = [*([factory] if factory else ()), *code_of(*(one.rejector for one in guard.scores))]
    modules = _code(f"DEMUR_MODULES={','.join(dict.fromkeys(p.partition(':')[0] for p in code))}")
    own = f"This runs {' and '.join(map(_code, code))}: start Python where it finds that code, "
    return [*lines, "", f"{own}with {modules} in the environment."] if code else lines


def _inputs(guard: BaseGuard) -> list[str]:
    channels, height, width = guard.shape
    colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    other = (
        "**resized** to this size (whole image, bilinear with antialiasing), and the reason of "
        "the decision says so"
        if guard.resize
        else "**an error**"
    )
    shown = [_code(name) for name in guard.class_names[:MOST_CLASSES]]
    more = len(guard.class_names) - len(shown)
    return [
        "## Images", "",
        f"- Size: {width} x {height} pixels, {colours}. Images of another size are {other}.",
        "- Values: 8 bits per channel, or floats in [0, 1]. Values out of range are "
        "an error.",
        f"- Classes: {', '.join(shown)}{f' and {more} more' if more else ''}.",
        f"- Class probabilities: softmax at temperature {guard.temperature:g}.",
        f"- This guard: {_plain(guard.name)}, version {guard.version}, digest `{guard.digest}`.",
    ]  # fmt: skip


def _rule(guard: BaseGuard) -> list[str]:
    lines = ["## Rule", "", "A prediction is accepted where every score reaches its threshold.", ""]
    lines += ["| score | threshold |", "|---|---:|"]
    rule = [(p.name, f"{p.threshold:.6g}" if p.rejects else "any") for p in guard.scores]
    lines += [f"| {_plain(name)} | {shown} |" for name, shown in rule]
    calibration = guard.calibration
    under = (calibration["certificate"] or {}).get("under")
    lines += ["", f"Chosen on {calibration['images']:,} {'attacked' if under else 'clean'} "
              f"calibration images: {_plain(guard.guarantee_text)}."]  # fmt: skip
    if calibration["certificate"] is None:
        shortfall = _plain(calibration["shortfall"] or "")
        lines.append(f"**The thresholds have no guarantee**: {shortfall}.")
    elif under:
        lines.append(
            "The guarantee holds for images from the distribution of the calibration images, each "
            "replaced by a wrong prediction that this attack finds and the rule accepts, if there "
            "is one. A stronger attack, or another radius, may break it."
        )
    else:
        lines.append(
            "The guarantee holds for clean images from the distribution of the calibration images. "
            "It says nothing about attacked images or about another distribution."
        )
    return lines


def _figures(guard: BaseGuard) -> list[str]:
    lines = [
        "## Figures", "",
        "Shares with exact 95% intervals. TPR is the accepted share of the correct predictions; "
        "risk is the share of errors among the accepted.", "",
        "| images | n | accuracy | coverage | TPR | risk |", "|---|---:|---:|---:|---:|---:|",
        _row("calibration, clean", guard.calibration),
    ]  # fmt: skip
    for found in guard.reported_rates:
        aim = f" ({found['aim']})" if found.get("aim") else ""  # older guards have none
        lines.append(_row(f"test, {found['attack']}{aim}", found))
    lines += ["", "The thresholds were chosen on the calibration images, so that row is not an "
              "independent test."]  # fmt: skip
    if chance := guard.calibration.get("chance_test"):  # older guards have none
        mark = "" if chance.get("passed") else "**"
        lines += ["", f"{mark}{_plain(str(chance.get('sentence')))}{mark}."]
    if not guard.reported_rates:
        lines.append("No decisions on other images or under attack were measured.")
    return lines


def _row(name: str, figures: dict[str, Any]) -> str:
    cells = [_share(figures[key]) for key in ("accuracy", "coverage", "tpr", "risk")]
    return f"| {_plain(name)} | {figures['images']:,} | {' | '.join(cells)} |"


def _share(share: dict[str, Any] | None) -> str:
    if share is None:
        return "none"
    value, low, high = (100 * share[key] for key in ("value", "lo", "hi"))
    return f"{value:.1f}% ({low:.1f} to {high:.1f})"


def _limits(guard: BaseGuard) -> list[str]:
    attacked = any(figures["attack"] != "clean" for figures in guard.reported_rates)
    known = (
        "The rows above show the attacks that were tried; a stronger attack may do more damage."
        if attacked
        else "This guard was not attacked. Nothing is known about adversarial examples."
    )
    if any(figures.get("aim") for figures in guard.reported_rates):
        known += " Attacks aimed elsewhere say little: attack this rule with threshold=T."
    return ["## Limits", "", f"{known} A rejected image needs another decision: a person, or a "
            "second model."]  # fmt: skip
