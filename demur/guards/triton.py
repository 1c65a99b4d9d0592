"""A guard as a model repository of NVIDIA Triton, which KServe reads too.

It holds NAME/config.pbtxt, NAME/labels.txt and NAME/VERSION/model.onnx with the decision rule.
Triton batches requests by itself.
"""

import re
from pathlib import Path

from demur.errors import BadInput
from demur.files.atomic import replace_folder, write_text
from demur.guards.decision import BaseGuard
from demur.guards.onnx_export import export_onnx

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
