"""A guard as a folder in the layout of the Hugging Face Hub.

Loading checks digests, types, shapes and sizes. It runs no code that came with the folder.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from demur.errors import BadInput, bad_input, shorten
from demur.files import checked_files
from demur.files.checked_files import (
    SIGNATURE,
    check_private_key,
    check_signature,
    read_tensors,
    replace_folder,
    sign_folder,
    write_json,
    write_tensors,
    write_text,
)
from demur.files.output_paths import check_output_folder
from demur.guards.calibration import GuardScore, on_device
from demur.guards.decision import BaseGuard, BuiltFrom
from demur.guards.export import export_onnx, model_card
from demur.guards.inputs import Shape
from demur.images import Domain
from demur.methods import Head
from demur.nets import NetSpec, RejectingNet
from demur.numerics import device_by_name
from demur.output import as_output
from demur.recipes import VOCABULARY
from demur.rejectors import FittedScore, Rejector
from demur.rejectors.rule import Score, as_score
from demur.runs.metadata import Maybe, Schema, read_metadata
from demur.spec import Spec, check_readable, read, show
from demur.spec.field_types import (
    Condition,
    NonNegativeInt,
    Positive,
    PositiveInt,
    UnitInterval,
    convert_value,
)
from demur.spec.importing import check_import_path, import_object
from demur.version import code_version

CONFIG, WEIGHTS, ARRAYS, CARD, ONNX, TRAINING = FILES = (
    "config.json", "model.safetensors", "scores.safetensors", "README.md", "model.onnx",
    "training.safetensors",
)  # fmt: skip
REMEDY = "save the guard again or fetch another copy"
LARGEST = 1024  # of a whole number in the spec of a net
MAX_SIDE, MAX_CLASSES, MAX_SCORES = 2048, 100_000, 8
MAX_NUMBERS = 1 << 30  # of one array of a fitted score
WRONG = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError)  # of sizes of no net
KINDS = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}

GuardName = Annotated[
    str,
    Condition(lambda v: v.isprintable() and 0 < len(v) <= 64, "of 1 to 64 printable characters"),
]
Count = Annotated[int, Condition(lambda v: 1 <= v <= MAX_NUMBERS, f"from 1 to {MAX_NUMBERS}")]
Side = Annotated[int, Condition(lambda v: 1 <= v <= MAX_SIDE, f"from 1 to {MAX_SIDE}")]
SHARE = Schema({"value": UnitInterval, "lo": UnitInterval, "hi": UnitInterval, "n": PositiveInt})
RATES = {  # shares are null where no image counts
    "images": PositiveInt, **dict.fromkeys(("accuracy", "coverage", "tpr", "risk"), Maybe(SHARE)),
}  # fmt: skip
SCORE = Schema({"rejector": str, "threshold": float | None, "arrays": dict[str, object]})
CALIBRATION = Schema(
    {
        "guarantee": str, "confidence": UnitInterval, "sentence": str, "shortfall": str | None,
        "certificate": dict[str, object] | None, "score_edges": list[float],
        "score_counts": list[NonNegativeInt], **RATES,
    },
    {"chance_test": dict[str, object], "classes_without_images": list[str]},  # not in older ones
)  # fmt: skip
FORMAT = Schema(
    {
        "format": Literal["demur-guard"], "format_version": Literal[1],
        "model": Schema({"net": str | None, "head": str | None, "factory": str | None}),
        "image": Schema({
            "channels": Side, "height": Side, "width": Side, "resize": bool,
            "mean": list[float] | None, "std": list[Positive] | None,
        }),
        "class_names": list[str], "temperature": Positive, "eps": UnitInterval,
        "scores": [SCORE], "calibration": CALIBRATION,
        "figures": [Schema({"attack": str, **RATES})], "files": dict[str, str],
    },
    {"name": GuardName, "version": PositiveInt, "training_images": Count},  # not in older ones
)  # fmt: skip


# ---------------------------------------------------------------------------------- saving


def save(
    guard: BaseGuard, folder: Path, factory: str | None, onnx: bool, sign: str | Path | None = None
) -> Path:
    """Write a guard to a folder; see `Guard.save`."""
    check_target(folder)
    check_private_key(sign)
    if not isinstance(guard.model, nn.Module):
        raise BadInput("only a torch module can be saved; wrap the function in a module")
    model = _model_config(guard, factory)
    with replace_folder(folder) as (half, _):
        half.mkdir(parents=True)
        # copies, since safetensors stores no tensors that share memory
        weights = {name: one.detach().clone() for name, one in guard.model.state_dict().items()}
        files = {WEIGHTS: write_tensors(half / WEIGHTS, weights)}
        scores, arrays = _score_configs(guard)
        if arrays:
            files[ARRAYS] = write_tensors(half / ARRAYS, arrays)
        if onnx:
            files[ONNX] = checked_files.content_digest(export_onnx(guard, half / ONNX).read_bytes())
        if (seen := guard.training_images) is not None:
            files[TRAINING] = write_tensors(half / TRAINING, {"digests": seen})
        config = {
            "format": "demur-guard", "format_version": 1,
            "name": convert_value(guard.name, GuardName, "name"),
            "version": convert_value(guard.version, PositiveInt, "version"),
            "model": model, "image": _image_config(guard, rebuilt=model["net"] is not None),
            "class_names": list(guard.class_names), "temperature": guard.temperature,
            "eps": guard.eps, "scores": scores, "calibration": guard.calibration,
            "figures": list(guard.reported_rates), "files": files,
            **({} if seen is None else {"training_images": len(seen)}),
            "created": datetime.now(UTC).isoformat(timespec="seconds"), "code": code_version(),
        }  # fmt: skip
        write_text(half / CARD, model_card(guard, factory))
        write_json(half / CONFIG, config)
        if sign is not None:
            sign_folder(half, sign)
    return folder


def check_target(folder: Path) -> None:
    """Raise BadInput if a guard cannot be saved here: something else is in the way."""
    check_output_folder(str(folder), "guard")
    names = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    if others := names - {*FILES, SIGNATURE}:  # the folder is replaced as a whole
        raise BadInput(f"{folder} holds other files, such as {min(others)}; name a new folder")
    if (folder / CONFIG).is_file():
        read_metadata(folder / CONFIG, FORMAT, "it is not a guard's; name a new folder")


def _model_config(guard: BaseGuard, factory: str | None) -> dict[str, str | None]:
    if factory is not None:
        _check_factory(factory)
    if guard.built_from is None or factory is not None:
        return {"net": None, "head": None, "factory": factory}
    for spec in guard.built_from:
        check_readable(spec)
    net, head = (show(spec, full=True) for spec in guard.built_from)
    return {"net": net, "head": head, "factory": None}


def _check_factory(factory: str) -> None:
    check_import_path(factory)
    if factory.startswith("__main__:"):
        raise BadInput(f"{shorten(factory)!r} is in a script; move it to a module of its own")


def _image_config(guard: BaseGuard, rebuilt: bool) -> dict[str, Any]:
    mean, std = guard.mean, guard.std
    domain = getattr(guard.model, "domain", None)
    if rebuilt and isinstance(domain, Domain):  # the net normalises by itself
        mean, std = domain.mean, domain.std
    return {
        **dict(zip(("channels", "height", "width"), guard.shape, strict=True)),
        "resize": guard.resize, "mean": mean, "std": std,
    }  # fmt: skip


def _score_configs(guard: BaseGuard) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The scores as JSON values, and the arrays of the fitted ones."""
    configs: list[dict[str, Any]] = []
    arrays: dict[str, Tensor] = {}
    for number, part in enumerate(guard.scores):
        check_readable(part.rejector)
        buffers = dict(part.score.named_buffers()) if isinstance(part.score, FittedScore) else {}
        arrays |= {f"{number}.{name}": tensor for name, tensor in buffers.items()}
        configs.append({
            "rejector": show(part.rejector, full=True),
            "threshold": part.threshold if math.isfinite(part.threshold) else None,
            "arrays": {
                name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
                for name, tensor in buffers.items()
            },
        })  # fmt: skip
    return configs, arrays


# ---------------------------------------------------------------------------------- loading


def load(
    folder: Path, model: nn.Module | None, device: str, public_key: str | Path | None = None
) -> BaseGuard:
    """Read a guard from a folder; see `Guard.load`."""
    where = device_by_name(device)
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}; name one that demur export wrote")
    if (folder / "recipe.txt").is_file():
        name = shlex.quote(str(folder))
        raise BadInput(f"{folder} is a run; make a guard with demur export {name} -o guard")
    if public_key is not None:
        check_signature(folder, public_key)
    config = read_config(folder)
    try:
        guard = _guard_of(folder, config, model, where)
        _probe(guard)
    except BadInput as error:
        text = str(error)
        raise BadInput(text if str(folder) in text else f"{folder / CONFIG}: {text}") from None
    return guard


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a guard, after its digest, keys, types and histogram are checked."""
    config = read_metadata(folder / CONFIG, FORMAT, REMEDY)
    calibration = config["calibration"]
    calibration.setdefault("chance_test", {})
    edges, counts = calibration["score_edges"], calibration["score_counts"]
    sizes = len(counts) == len(edges) + 1 and sum(counts) == calibration["images"]
    if not sizes or sorted(set(edges)) != edges:
        raise BadInput(
            f"{folder / CONFIG}: the histogram of the calibration scores is inconsistent; {REMEDY}"
        )
    return config


def _guard_of(
    folder: Path, config: dict[str, Any], model: nn.Module | None, device: torch.device
) -> BaseGuard:
    image, names = config["image"], config["class_names"]
    shape: Shape = (image["channels"], image["height"], image["width"])
    if not 2 <= len(names) <= MAX_CLASSES or len(set(names)) < len(names) or not all(names):
        raise BadInput(f"class_names must be 2 to {MAX_CLASSES:,} different words; {REMEDY}")
    if not all(name.isprintable() for name in names):  # may hold escapes for a terminal
        raise BadInput(f"class_names holds a name that cannot be printed; {REMEDY}")
    mean, std = (image[key] and tuple(map(float, image[key])) for key in ("mean", "std"))
    if (mean is None) != (std is None):
        raise BadInput(f"image has one of mean and std; {REMEDY}")
    for values in (mean, std):
        if values is not None and len(values) != shape[0]:
            raise BadInput(f"image has {len(values)} values for {shape[0]} channels; {REMEDY}")
    built_from = _built_from(config["model"])
    if built_from is not None and model is None:
        domain = Domain(len(names), shape, mean or (0.0,) * shape[0], std or (1.0,) * shape[0])
        loaded = _load_built(folder, config, built_from, domain)
    else:
        loaded = _made(config["model"]["factory"]) if model is None else model
        loaded.load_state_dict(_tensors(folder, config, WEIGHTS, loaded.state_dict()))
    loaded.to(device).eval().requires_grad_(False)
    if isinstance(loaded, RejectingNet):
        loaded.freeze_for_inference()
        if device.type == "cpu":  # as LoadedRun does: faster there
            loaded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    scores = on_device(_scores(folder, config), device)
    normalised_inside, count = built_from is not None, config.get("training_images", 0)
    seen = torch.empty(count, dtype=torch.int64, device="meta")
    return BaseGuard(
        loaded, scores, shape, tuple(names), float(config["temperature"]), image["resize"],
        None if normalised_inside else mean, None if normalised_inside else std,
        config["calibration"], tuple(config["figures"]),
        float(config["eps"]), built_from, config.get("name", "guard"), config.get("version", 1),
        _tensors(folder, config, TRAINING, {"digests": seen})["digests"] if count else None,
    )  # fmt: skip


def _built_from(model: dict[str, str | None]) -> BuiltFrom | None:
    if model["net"] is None or model["head"] is None:
        return None
    net, head = read(model["net"], VOCABULARY), read(model["head"], VOCABULARY)
    if not isinstance(net, NetSpec) or not isinstance(head, Head):
        raise BadInput(f"model does not hold the specs of a net and a head; {REMEDY}")
    for value in _numbers_in((net, head)):
        if abs(value) > LARGEST:
            raise BadInput(f"the net has a size of {value}, above {LARGEST}; {REMEDY}")
    return BuiltFrom(net, head)


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, Spec):
        for f in fields(value):
            yield from _numbers_in(getattr(value, f.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _numbers_in(part)
    elif isinstance(value, int):
        yield value


def _load_built(
    folder: Path, config: dict[str, Any], built_from: BuiltFrom, domain: Domain
) -> nn.Module:
    """Build the net without memory for its weights, then load them if they have its shapes."""
    misfit = f"the net cannot be built from its spec; {REMEDY}"
    with bad_input(misfit, WRONG), torch.device("meta"):
        net: nn.Module = built_from.net.build(domain, built_from.head)
    tensors = _tensors(folder, config, WEIGHTS, net.state_dict())
    net.load_state_dict(tensors, assign=True)
    if any(tensor.is_meta for tensor in chain(net.parameters(), net.buffers())):
        net = built_from.net.build(domain, built_from.head)  # some buffer is not in the file
        net.load_state_dict(tensors)
    return net


def _tensors(
    folder: Path, config: dict[str, Any], name: str, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    if name not in config["files"]:
        raise BadInput(f"files has no digest of {name}; {REMEDY}")
    return read_tensors(folder / name, config["files"][name], REMEDY, like)


def _made(factory: str | None) -> nn.Module:
    """The module that a factory returns, if the program trusts the factory's module."""
    if factory is None:
        raise BadInput(
            "the model was made outside demur and saved without a factory; give it as "
            "Guard.load(folder, model=...)"
        )
    _check_factory(factory)
    instead = ", or give the model as Guard.load(folder, model=...)"
    found = import_object(factory, nn.Module, instead)
    try:
        module = found() if callable(found) else None
    except Exception as error:  # a user's function may raise anything
        raise BadInput(f"{shorten(factory)!r} failed: {shorten(str(error))}") from None
    if not isinstance(module, nn.Module):
        raise BadInput(f"{shorten(factory)!r} does not return a module; give the model itself")
    return module


def _scores(folder: Path, config: dict[str, Any]) -> tuple[GuardScore, ...]:
    configs = config["scores"]
    if not 1 <= len(configs) <= MAX_SCORES:
        raise BadInput(f"scores must hold 1 to {MAX_SCORES} scores; {REMEDY}")
    like = {
        f"{number}.{name}": _like(f"scores.{number}.{name}", described)
        for number, one in enumerate(configs)
        for name, described in one["arrays"].items()
    }
    arrays = _tensors(folder, config, ARRAYS, like) if like else {}
    found = []
    for number, one in enumerate(configs):
        rejector = read(one["rejector"], VOCABULARY)
        if not isinstance(rejector, Rejector):
            raise BadInput(f"scores.{number}.rejector is not a rejector; {REMEDY}")
        own = {name: arrays[f"{number}.{name}"] for name in one["arrays"]}
        threshold = -math.inf if one["threshold"] is None else float(one["threshold"])
        found.append(GuardScore(rejector, _score(rejector, own), threshold))
    return tuple(found)


def _like(where: str, described: Any) -> Tensor:
    """An array without memory of a described type and shape: ["float32", 10, 64]."""
    kind, *shape = convert_value(described, list[object], where) or [None]
    sizes = [convert_value(size, PositiveInt, where) for size in shape]
    if not isinstance(kind, str) or kind not in KINDS or math.prod(sizes) > MAX_NUMBERS:
        raise BadInput(f"{where} is not an array of at most {MAX_NUMBERS:,} numbers; {REMEDY}")
    return torch.empty(sizes, dtype=KINDS[kind], device="meta")


def _score(rejector: Rejector, arrays: dict[str, Tensor]) -> Score:
    """The score of a rejector, restored from its arrays if it is a fitted one."""
    if isinstance(rejector, Score):
        if arrays:
            raise BadInput(f"{show(rejector)} has arrays, but is not fitted; {REMEDY}")
        return as_score(rejector)
    return rejector.restore(arrays)


def _probe(guard: BaseGuard) -> None:
    """Raise BadInput unless the parts fit together: the guard decides on a blank image."""
    blank, classes = torch.full((2, *guard.shape), 0.5), len(guard.class_names)
    misfit = f"the net, the scores and the image size do not fit; {REMEDY}"
    with bad_input(misfit, (*WRONG, AttributeError)), torch.no_grad():
        out = as_output(guard.output(blank.to(guard.device)), 2)
        extremes = torch.zeros_like(out.logits)  # predictions of the first and last class
        extremes[0, 0] = extremes[1, -1] = 1
        outputs = (out, out._replace(logits=extremes))
        shapes = {tuple(part.score(o).shape) for part in guard.scores for o in outputs}
    if out.logits.shape[1] != classes or shapes != {(2,)}:
        raise BadInput(f"the net has {out.logits.shape[1]} classes and {classes} names; {REMEDY}")
