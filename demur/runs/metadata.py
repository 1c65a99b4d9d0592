"""JSON files of a run: their keys and types, checked whenever one is read; and provenance.

Keys that a schema does not name are provenance and may hold anything.
"""

import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch

from demur.data import SplitName
from demur.errors import BadInput
from demur.files.checked_files import read_json
from demur.spec.field_types import (
    Condition,
    NonNegativeInt,
    NumberOrInfinity,
    PositiveInt,
    UnitInterval,
    convert_value,
)
from demur.version import code_version

Metadata = dict[str, Any]
FileName = Annotated[
    str,
    Condition(lambda v: bool(re.fullmatch(r"\w[\w.-]{0,99}", v)), "that names a file beside it"),
]
LIBRARIES = ("numpy", "safetensors")


class Schema(NamedTuple):
    """The types of the keys that a file must have, and of those that it may have.

    A type is one of `convert_value`, another Schema, Maybe(Schema) or [Schema] for a list.
    """

    required: Mapping[str, Any]
    optional: Mapping[str, Any] = {}


class Maybe(NamedTuple):
    """None, or values of a schema."""

    schema: Schema


PROBE = Schema(dict.fromkeys(("images", "random_outputs", "zero_gradients"), NonNegativeInt))
RECORD = Schema(
    {
        "label": str, "split": SplitName, "digest": str, "file_digest": str, "spec": str,
        "attack": str, "weights": str, "data": str, "created": str, "n": PositiveInt,
        "features": bool, "images": NonNegativeInt, "thresholds": dict[str, NumberOrInfinity],
        "fitted": dict[str, str],
    },
    {
        "archive": bool, "scores": list[str], "scores_fitted": list[str], "scored_by": str,
        "probe": PROBE, "precision": str, "source": str, "recipe": str, "epoch": int,
        "seed": int | None, "first_of": str, "just_past": NonNegativeInt,
        "just_before": NonNegativeInt, "first_index": NonNegativeInt, "largest_l2": float,
        "largest_linf": float, "model": str, "user_code": dict[str, str],
    },
)  # fmt: skip
CHECKPOINT = Schema(
    {
        "epoch": PositiveInt, "value": float | None, "weights": str, "recipe_digest": str,
        "reason": str,
    },
    {
        "selection_split": SplitName | None, "metrics": str, "base_weights": str,
        "quantised_from": str,
        "data": dict[str, str],
    },
)  # fmt: skip
BEST = Schema({"epoch": PositiveInt, "value": float | None})
STATE = Schema(
    {
        "epoch": PositiveInt, "file": FileName, "digest": str, "best_file": FileName,
        "best_digest": str, "best": BEST, "lines": list[str],
    },
    {"plan": dict[str, object] | None},
)  # fmt: skip
INTERVAL = Schema({"lo": float, "hi": float})
CERTIFICATE = Schema(
    {
        "rejector": str, "rejector_spec": str, "quantity": Literal["risk", "tpr", "coverage"],
        "level": UnitInterval, "confidence": UnitInterval, "guarantee": str, "sentence": str,
        "thresholds": list[NumberOrInfinity], "on": str, "attack": str, "attack_spec": str,
        "valid_for": str, "cal_record": str, "cal_images": PositiveInt, "weights": str,
        "n": PositiveInt, "pilot": PositiveInt, "accepted": NonNegativeInt,
        "accepted_wrong": NonNegativeInt, "risk_interval": INTERVAL, "tpr_interval": INTERVAL,
        "coverage_interval": INTERVAL,
    }
)  # fmt: skip


def read_metadata(path: Path, schema: Schema, remedy: str) -> Metadata:
    """Metadata of a JSON file, after its digest, its keys and their types are checked."""
    metadata = read_json(path, remedy)
    try:
        _check(metadata, schema, "")
    except BadInput as error:
        raise BadInput(f"{path} is damaged: {error}; {remedy}") from None
    return metadata


def _check(value: Any, kind: Any, where: str) -> None:
    """Raise BadInput if a key is missing or a value has another type; `where` is its name."""
    if isinstance(kind, Maybe):
        if value is not None:
            _check(value, kind.schema, where)
    elif isinstance(kind, list):
        for number, one in enumerate(convert_value(value, list[object], where)):
            _check(one, kind[0], f"{where}.{number}")
    elif isinstance(kind, Schema):
        if not isinstance(value, dict):
            raise BadInput(f"{where} must be a dictionary")
        for key, inner in {**kind.required, **kind.optional}.items():
            name = f"{where}.{key}".lstrip(".")
            if key in value:
                _check(value[key], inner, name)
            elif key in kind.required:
                raise BadInput(f"the key {name!r} is missing")
    else:
        convert_value(value, kind, where)


def provenance(device: torch.device) -> dict[str, str | int]:
    """Code version, library versions, device and number of threads, by name."""
    on_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
    return {
        "code": code_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with the build, since results depend on it
        **{name: version(name) for name in LIBRARIES},
        "device": f"{device} ({kind})",
        "threads": torch.get_num_threads(),
    }
