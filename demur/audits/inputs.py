"""Other people's models and images for an audit.

    load_model("my_code:make_net", checkpoint="weights.pt")     # or timm, or a published net
    (x, y), cal = audit_images("photos", n=500, size=32)        # or an .npz, or a data set by name

A model is code: whoever wrote the module runs as you. A checkpoint is read as weights only.
Calibration images are None where the data have none; the audit then holds some test images out.
"""

import importlib
import inspect
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from demur.attacks.attack_model import Model
from demur.data import CIFAR10, CIFAR100, DATASETS, OwnImages
from demur.data.sources import Source, open_source
from demur.errors import BadInput, first_line, suggestion
from demur.files.image_files import resize_pixels
from demur.methods import RR, NoHead
from demur.nets import ResNet18, WideResNet
from demur.nets.net import NetSpec, Normalise, RejectingNet
from demur.spec.importing import allow_import, import_object

RECTIFIED = "rectified-rejection"
CONTAINERS = ("state_dict", "model_state_dict", "model", "net")  # entries that hold the weights
PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and torch.compile
OFFICIAL = (  # names in the Rectified-Rejection repository, and here
    (r"^layer(\d)\.(\d+)\.", lambda m: f"trunk.stages.{int(m[1]) - 1}.{m[2]}."),
    (r"^block(\d)\.layer\.(\d+)\.", lambda m: f"trunk.stages.{int(m[1]) - 1}.{m[2]}."),
    (r"^conv1\.", lambda m: "trunk.stem."),
    (r"^(bn|bn1)\.", lambda m: "trunk.norm."),
    (r"^(linear|fc)\.", lambda m: "classify."),
    (r"^dense\.", lambda m: "aux.layers."),
    (r"\.bn([12])\.", lambda m: f".norm{m[1]}."),
    (r"\.(shortcut\.0|convShortcut)\.", lambda m: ".shortcut."),
)  # fmt: skip
LabelledImages = tuple[Any, Any]  # images N, C, H, W and labels N, as arrays or tensors


def load_model(text: str, checkpoint: str | Path | None = None) -> Model:
    """Return the model that a text names, in eval mode, with the weights of a checkpoint.

    Args:
        text: MODULE:NAME of a model, of a class, or of a function without arguments that returns a
            model; timm:NAME; or rectified-rejection for a checkpoint of that repository.
        checkpoint: A .safetensors file, or a file of torch.save that holds weights only.
    """
    weights = None if checkpoint is None else read_weights(Path(checkpoint))
    if text == RECTIFIED:
        if weights is None:
            raise BadInput(f"{RECTIFIED} needs a checkpoint; give --checkpoint FILE")
        return official_net(weights).eval()
    module, _, name = text.partition(":")
    if not module or not name:
        raise BadInput(f"{text!r} is no model; write MODULE:NAME, timm:NAME or {RECTIFIED}")
    if module == "timm" and weights is None:
        raise BadInput(f"timm:{name} would have random weights; give --checkpoint FILE")
    model = _timm_model(name) if module == "timm" else _imported(text)
    if weights is not None:
        _load_weights(model, weights)
    return model.eval() if isinstance(model, nn.Module) else model


def _imported(text: str) -> Model:
    """Return a model from a module: the object itself, or what a factory returns."""
    allow_import(text)  # the user named it
    found: Any = import_object(text)
    needed = "it must be a model, or a class or function without arguments that returns one"
    is_class = inspect.isclass(found)
    if is_class or (inspect.isfunction(found) and not _required_parameters(found)):
        try:
            found = found()
        except Exception as error:  # of the user's code
            raise BadInput(
                f"{text} fails with {type(error).__name__}: {first_line(error)}; {needed}"
            ) from error
    if not callable(found):
        raise BadInput(f"{text} gives {type(found).__name__}; {needed}")
    model: Model = found
    return model


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _timm_model(name: str) -> nn.Module:
    """Return a net of timm behind the normalisation that it was trained with."""
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError:
        raise BadInput("timm is not installed; install it with pip install timm") from None
    try:
        net = timm.create_model(name, pretrained=False)
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"timm has no model {name!r}: {error}") from None
    config: Mapping[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    mean, std = config.get("mean", (0.0,) * 3), config.get("std", (1.0,) * 3)
    return nn.Sequential(Normalise(mean, std), net)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name; code in it is never run."""
    if not path.is_file():
        raise BadInput(f"{path} is no file; name a checkpoint")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ == "UnpicklingError" and zipfile.is_zipfile(path):  # it holds code
            raise BadInput(
                f"{path} holds more than weights; save model.state_dict() with safetensors"
            ) from None
        raise BadInput(
            f"{path} cannot be read as weights: {first_line(error)}; save model.state_dict()"
        ) from None
    for name in CONTAINERS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    entries = found if isinstance(found, Mapping) else {}
    weights = {_without_prefix(name): t for name, t in entries.items() if isinstance(t, Tensor)}
    if not weights:
        holds = f"its entries are {', '.join(map(str, entries))}; " if entries else ""
        raise BadInput(f"{path} holds no weights by name; {holds}save model.state_dict()")
    return weights


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _load_weights(model: Model, weights: Mapping[str, Tensor]) -> None:
    """Load weights into a module, or into its only part that has exactly these names."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"a checkpoint needs a torch module, not {type(model).__name__}")
    parts = [part for part in model.modules() if set(part.state_dict()) == set(weights)]
    if len(parts) > 1:
        raise BadInput(
            f"the checkpoint fits {len(parts)} parts of the model; load it where the model is built"
        )
    target = parts[0] if parts else model
    try:
        target.load_state_dict(weights)
    except RuntimeError:
        own = set(model.state_dict())
        missing, extra = sorted(own - set(weights))[:3], sorted(set(weights) - own)[:3]
        raise BadInput(
            f"the checkpoint does not fit the model: it lacks {', '.join(missing) or 'nothing'}, "
            f"has {', '.join(extra) or 'nothing'} besides, or shapes differ"
        ) from None


def official_net(weights: Mapping[str, Tensor]) -> RejectingNet:
    """Return the net of a checkpoint of the Rectified-Rejection repository.

    Raises:
        BadInput: The checkpoint is of another net than its PreActResNet-18 or WideResNet, with the
            head of the paper (with batch norm) or without a head.
    """
    renamed = {_renamed(name): tensor for name, tensor in weights.items()}
    wide = any(name.startswith("block1.") for name in weights)
    try:
        net = _official_spec(weights, wide).build(
            _domain(len(renamed["classify.bias"])),
            RR() if any(name.startswith("aux.") for name in renamed) else NoHead(),
        )
        net.load_state_dict(net.state_dict() | renamed)
    except (KeyError, RuntimeError, BadInput):
        raise BadInput(
            "the checkpoint is not of PreActResNet18, PreActResNet18_twobranch_DenseV1, WideResNet "
            "or WideResNet_twobranch_DenseV1 with batch norm; give the model as MODULE:NAME"
        ) from None
    return net


def _renamed(name: str) -> str:
    for pattern, replacement in OFFICIAL:
        name = re.sub(pattern, replacement, name)
    return name


def _official_spec(weights: Mapping[str, Tensor], wide: bool) -> NetSpec:
    if not wide:
        return ResNet18(width=len(weights["conv1.weight"]))
    blocks = {name.split(".")[2] for name in weights if name.startswith("block1.")}
    return WideResNet(depth=6 * len(blocks) + 4, widen=weights["fc.weight"].shape[1] // 64)


def _domain(classes: int) -> Any:
    # The repository normalises both data sets by the same constants.
    shared = CIFAR10().domain
    return (CIFAR100().domain if classes == 100 else shared)._replace(
        classes=classes, mean=shared.mean, std=shared.std
    )


def audit_images(
    data: str, n: int | None, size: int | None = None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Return test images with labels, and calibration images if the data have them.

    Args:
        data: An .npz file with x and y, a folder with one folder per class, or a data set.
        n: The number of images, from the first; None takes all.
        size: The side in pixels to which images of a folder are resized; None keeps their size.
    """
    if n is not None and n < 1:
        raise BadInput(f"--n is {n}; give at least 1")
    if size is not None and size < 1:
        raise BadInput(f"--size is {size}; give a side in pixels, at least 1")
    if not data.strip():
        raise BadInput("--data is empty; name an .npz file, a folder or a data set")
    if Path(data).is_dir():
        return _folder(data, n, size)
    if size is not None:
        raise BadInput("--size is for a folder of images; leave it out")
    return _arrays(data, n) if data.endswith(".npz") else _named(data, n)


def _arrays(data: str, n: int | None) -> tuple[LabelledImages, LabelledImages | None]:
    path = Path(data)
    if not path.is_file():
        raise BadInput(f"{data} is no file; name an .npz file with x and y")
    if not zipfile.is_zipfile(path):
        raise BadInput(f"{data} is no .npz file; write one with numpy.savez(file, x=x, y=y)")
    try:
        with np.load(path) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except Exception as error:
        raise BadInput(f"{data} cannot be read as .npz: {error}") from None
    if not {"x", "y"} <= set(found):
        raise BadInput(
            f"{data} needs arrays x (N, C, H, W) and y (N); cal_x and cal_y are optional"
        )
    if ("cal_x" in found) != ("cal_y" in found):
        raise BadInput(f"{data} has only one of cal_x and cal_y; give both or none")
    cal = (found["cal_x"], found["cal_y"]) if "cal_x" in found else None
    return (found["x"][:n], found["y"][:n]), cal


def _named(name: str, n: int | None) -> tuple[LabelledImages, LabelledImages | None]:
    known = {kind.__name__.lower(): kind for kind in DATASETS if kind is not OwnImages}
    if name.lower() not in known:
        raise BadInput(
            f"--data is {name!r}, no .npz file, no folder and no data set; "
            f"{suggestion(name, known)}"
        )
    splits = known[name.lower()]().load()
    test = splits["test"] if n is None else splits["test"].first(n)
    cal = splits["cal"].batch(slice(None)) if "cal" in splits else None
    return test.batch(slice(None)), cal


def _folder(
    data: str, n: int | None, size: int | None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Return the images of a folder; with folders of splits those of test and of cal.

    Without n all are read in their order. With n they are drawn evenly over that order, which
    goes class by class.
    """
    source = open_source(data)
    classes = {
        name: number for number, name in enumerate(sorted({e.label for e in source.entries}))
    }
    rows = {
        split: [i for i, entry in enumerate(source.entries) if entry.split == split]
        for split in ("test", "cal", None)
    }
    test = rows["test"] or rows[None]
    if not test:
        raise BadInput(f"{data} has no folder test; add one, or name the folder to attack itself")
    if n is not None and n < len(test):
        test = [test[i * len(test) // n] for i in range(n)]
    cal = _read(source, rows["cal"], classes, size) if rows["cal"] else None
    return _read(source, test, classes, size), cal


def _read(
    source: Source, rows: list[int], classes: dict[str, int], size: int | None
) -> LabelledImages:
    """Return uint8 images N, 3, H, W and labels, the positions of the sorted class names."""
    images = []
    for i in rows:
        try:
            images.append(source.decode(i, source.content(i)))
        except BadInput as error:
            raise BadInput(f"{source.entries[i].name}: {error}") from None
    if size is not None:
        images = [resize_pixels(pixels, size, size) for pixels in images]
    shapes = sorted({pixels.shape[:2] for pixels in images})
    if len(shapes) > 1:
        (h, w), (other_h, other_w) = shapes[0], shapes[-1]
        raise BadInput(
            f"the images have several sizes, from {h} x {w} to {other_h} x {other_w} pixels; give "
            "--size, the side that the model takes"
        )
    x = np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))
    return x, np.array([classes[source.entries[i].label] for i in rows])
