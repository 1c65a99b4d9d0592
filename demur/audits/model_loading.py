"""Any model as attacks query it: from a text or an object.

A model is code: whoever wrote the module runs as you. A checkpoint is read as weights only.
Packages of other kinds of models are imported only when such a model is asked for.
"""

import importlib
import inspect
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from demur.attacks.attack_model import AttackModel, Model, QueryModel
from demur.attacks.wrappers import RejectClassModel
from demur.audits.queries import HttpService, MeteredFunction, Queries
from demur.data import CIFAR10, CIFAR100
from demur.errors import BadInput, first_line, shorten
from demur.methods import RR, NoHead
from demur.nets import ResNet18, WideResNet
from demur.nets.net import NetSpec, Normalise, RejectingNet
from demur.runs import Run
from demur.spec.importing import allow_import, import_object

RECTIFIED = "rectified-rejection"
CONTAINERS = ("state_dict", "model_state_dict", "model", "net")  # entries that hold the weights
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
KINDS = (
    "a run or a net of demur list models, hub:OWNER/NAME, MODULE:NAME, FILE.onnx, http://ADDRESS, "
    f"timm:NAME, transformers:FOLDER or {RECTIFIED}"
)
ONNX_TYPES = {
    "tensor(uint8)": np.uint8, "tensor(double)": np.float64, "tensor(float16)": np.float16,
}  # fmt: skip
KERAS = ("keras", "tensorflow", "tf_keras")  # packages whose models have predict
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SMALLEST = 1e-12  # probability whose log is still taken


def load_model(
    text: str, checkpoint: str | Path | None = None, adapter: str | None = None,
    queries: Queries = Queries(),
) -> Model:  # fmt: skip
    """Return the model that a text names, in eval mode, with the weights of a checkpoint.

    Args:
        text: A run folder, the name of a run or of a net of the zoo, or hub:OWNER/NAME of a run on
            the Hugging Face hub; MODULE:NAME of a model, of a class, or of a function without
            arguments that returns a model; FILE.onnx or FILE.onnx:OUTPUT; the address of a service;
            timm:NAME; transformers:FOLDER of an image classifier; or rectified-rejection for a
            checkpoint of that repository.
        checkpoint: A .safetensors file, or a file of torch.save that holds weights only.
        adapter: MODULE:NAME of a function (images, send) to logits for a service with another
            format than demur's; see `HttpService`.
        queries: Limits and the log of a model without gradients.
    """
    function = _function(text, adapter)
    if function is not None:
        if checkpoint is not None:
            raise BadInput(f"{shorten(text)} has its own weights; leave --checkpoint out")
        model = _metered(QueryModel(function), text, queries)
        tells = isinstance(function, HttpService) and adapter is None  # what it rejects
        return RejectClassModel(model) if tells else model
    if adapter is not None:
        raise BadInput("--adapter is for a service; give its address, such as http://HOST:8000")
    module, _, name = text.partition(":")
    if text != RECTIFIED and not (module and name and module != "hub"):
        if checkpoint is not None:
            raise BadInput(f"{shorten(text)!r} is no model for a checkpoint; write {KINDS}")
        try:
            run = Run.open(text)
        except BadInput as reason:
            if module == "hub":
                raise
            raise BadInput(f"{shorten(text)!r} is no model; write {KINDS} ({reason})") from None
        return run.net(torch.device("cpu"))
    weights = None if checkpoint is None else read_weights(Path(checkpoint))
    if weights is None and (text == RECTIFIED or module == "timm"):
        raise BadInput(f"{text} has no weights of its own; give --checkpoint FILE")
    if weights is not None and text == RECTIFIED:
        return official_net(weights).eval()
    makers = {"timm": _timm_model, "transformers": _transformers_model}
    model = makers[module](name) if module in makers else as_model(_imported(text))
    if weights is not None:
        _load_weights(model, weights)
    model = model.eval() if isinstance(model, nn.Module) else model
    return _metered(model, text, queries)


def as_model(given: Any) -> Model:
    """Return a text or an object as a model: a module, a function, or another package's classifier.

    A classifier of scikit-learn gets flat images, N, C * H * W; one of Keras gets them in the order
    of axes of its input. Neither has gradients. Their classes must be numbered from 0.
    """
    if isinstance(given, str | Path):
        return load_model(str(given))
    if any(base.__module__.partition(".")[0] in KERAS for base in type(given).__mro__):
        # Not as a module, though some are one: the order of axes differs.
        shape = getattr(given, "input_shape", ("", "", "", 0))
        return QueryModel(lambda x: given.predict(_in_layout(x, shape), verbose=0))
    if isinstance(given, nn.Module | AttackModel):
        return given
    if hasattr(given, "predict_proba") or hasattr(given, "decision_function"):
        classes = np.asarray(getattr(given, "classes_", ()))
        if classes.tolist() != list(range(len(classes))) or len(classes) == 0:
            raise BadInput(
                f"the classes of {type(given).__name__} are {shorten(str(classes.tolist()))}; fit "
                "it with labels from 0 without gaps"
            )
        return QueryModel(lambda x: _scores(given, x.reshape(len(x), -1)))
    if not callable(given):
        raise BadInput(
            f"{type(given).__name__} is no model; give an nn.Module, a function from images to "
            "logits, a classifier of scikit-learn or Keras, or a text as for demur audit"
        )
    return given  # type: ignore[no-any-return]


def _scores(classifier: Any, x: NDArray[Any]) -> NDArray[Any]:
    """Return the log probabilities of a scikit-learn classifier, else its decision function."""
    if hasattr(classifier, "predict_proba"):
        return np.log(np.maximum(classifier.predict_proba(x), SMALLEST))  # type: ignore[no-any-return]
    scores = np.asarray(classifier.decision_function(x))
    return scores if scores.ndim == 2 else np.stack((0 * scores, scores), 1)


def _in_layout(x: NDArray[Any], shape: Any) -> NDArray[Any]:
    """Return images N, C, H, W in the order of axes of an input's shape; 0 is any number."""
    if len(shape) == 4 and shape[3] in (0, x.shape[1]) and shape[1] != x.shape[1]:
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    return x


def _metered(model: Model, text: str, queries: Queries) -> Model:
    """Return the model with limits; BadInput if it has gradients, which no log can repeat."""
    if queries == Queries():
        return model
    if not isinstance(model, QueryModel):
        if isinstance(model, nn.Module):
            raise BadInput("a query budget is for models without gradients; leave it out")
        model = QueryModel(model)
    return QueryModel(MeteredFunction(model.function, text, queries))


def _function(text: str, adapter: str | None) -> Callable[[NDArray[Any]], Any] | None:
    """Return the function of an ONNX file or of a service; None for another kind of model."""
    if text.startswith(("http://", "https://")):
        if adapter is None:
            return HttpService(text)
        allow_import(adapter)  # the user named it
        found: Any = import_object(adapter)
        if not callable(found):
            raise BadInput(f"{adapter} is no function; --adapter takes a function (images, send)")
        return HttpService(text, found)
    file, _, output = text.rpartition(".onnx:") if ".onnx:" in text else (text[:-5], "", "")
    if text.endswith(".onnx") or output:
        return _onnx_function(Path(f"{file}.onnx"), output)
    return None


def _package(name: str, pip: str | None = None) -> Any:
    """Import an optional package; BadInput with the line that installs it if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(
            f"{name} cannot be imported ({first_line(error)}); install it with "
            f"pip install {pip or name}"
        ) from None


def _onnx_function(path: Path, output: str) -> Callable[[NDArray[Any]], Any]:
    """Return an ONNX file as a function of images; a fixed batch size is kept."""
    if not path.is_file():
        raise BadInput(f"{path} is no file; name an ONNX file")
    runtime = _package("onnxruntime", "'demur[onnx]'")
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # of the runtime, about a stranger's file
        raise BadInput(f"{path} cannot be read as ONNX: {shorten(first_line(error))}") from None
    inputs, names = session.get_inputs(), [one.name for one in session.get_outputs()]
    if len(inputs) != 1:
        raise BadInput(f"{path} has {len(inputs)} inputs; it needs one, for images")
    if output not in names and (output or len(names) > 1):
        what = f"no output {output!r}" if output else f"{len(names)} outputs"
        raise BadInput(f"{path} has {what}; choose the logits: " + " or ".join(
            f"{path}:{name}" for name in names
        ))  # fmt: skip
    (given,), chosen = inputs, [output or names[0]]
    step = given.shape[0] if given.shape and isinstance(given.shape[0], int) else None

    def run(x: NDArray[Any]) -> NDArray[Any]:
        x = _in_layout(x, given.shape)
        x = (255 * x).round() if given.type == "tensor(uint8)" else x
        x = x.astype(ONNX_TYPES.get(given.type, np.float32))
        parts = [x[i : i + (step or len(x))] for i in range(0, len(x), step or len(x))]
        padded = [np.resize(part, (step or len(part), *part.shape[1:])) for part in parts]
        outs = [session.run(chosen, {given.name: part})[0] for part in padded]
        return np.concatenate(outs)[: len(x)]

    return run


def _transformers_model(folder: str) -> nn.Module:
    """Return an image classifier saved by transformers, with the normalisation of its processor."""
    if not Path(folder, "config.json").is_file():
        raise BadInput(f"{folder} has no config.json; name a folder of model.save_pretrained")
    transformers = _package("transformers")
    try:
        net = transformers.AutoModelForImageClassification.from_pretrained(
            folder, local_files_only=True
        )
    except Exception as error:  # of the package, about a stranger's folder
        raise BadInput(
            f"{folder} is no image classifier of transformers: {shorten(first_line(error))}"
        ) from None
    file = Path(folder, "preprocessor_config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        raise BadInput(f"{file} is no JSON file; save the processor again") from None
    if not config.get("do_normalize", bool(config)):
        return net  # type: ignore[no-any-return]
    mean, std = (config.get(key, 0.5) for key in ("image_mean", "image_std"))
    channels = getattr(net.config, "num_channels", 3)
    mean, std = (np.broadcast_to(value, channels).tolist() for value in (mean, std))
    return nn.Sequential(Normalise(mean, std), net)


def _imported(text: str) -> Model:
    """Return a model from a module: the object itself, or what a factory returns."""
    allow_import(text)  # the user named it
    found: Any = import_object(text)
    needed = "it must be a model, or a class or function without arguments that returns one"
    parameters = inspect.signature(found).parameters.values() if inspect.isfunction(found) else ()
    required = [p for p in parameters if p.kind in POSITIONAL and p.default is p.empty]
    if inspect.isclass(found) or (inspect.isfunction(found) and not required):
        try:
            found = found()
        except Exception as error:  # of the user's code
            raise BadInput(
                f"{text} fails with {type(error).__name__}: {first_line(error)}; {needed}"
            ) from error
    if not callable(found) and not hasattr(found, "predict"):  # a classifier of scikit-learn
        raise BadInput(f"{text} gives {type(found).__name__}; {needed}")
    return found  # type: ignore[no-any-return]


def _timm_model(name: str) -> nn.Module:
    """Return a net of timm behind the normalisation that it was trained with."""
    timm = _package("timm")
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
    prefix = re.compile("^(module[.])?(_orig_mod[.])?")  # of DataParallel and torch.compile
    weights = {prefix.sub("", name): t for name, t in entries.items() if isinstance(t, Tensor)}
    if not weights:
        holds = f"its entries are {', '.join(map(str, entries))}; " if entries else ""
        raise BadInput(f"{path} holds no weights by name; {holds}save model.state_dict()")
    return weights


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

    BadInput is raised unless it is of its PreActResNet-18 or WideResNet, with the head of the paper
    (with batch norm) or without a head.
    """
    renamed = {_renamed(name): tensor for name, tensor in weights.items()}
    blocks = {name.split(".")[2] for name in weights if name.startswith("block1.")}
    try:
        spec: NetSpec = ResNet18(width=len(weights["conv1.weight"]))
        if blocks:
            widen = weights["fc.weight"].shape[1] // 64
            spec = WideResNet(depth=6 * len(blocks) + 4, widen=widen)
        classes, shared = len(renamed["classify.bias"]), CIFAR10().domain
        domain: Any = CIFAR100().domain if classes == 100 else shared
        # The repository normalises both data sets by the same constants.
        domain = domain._replace(classes=classes, mean=shared.mean, std=shared.std)
        head = RR() if any(name.startswith("aux.") for name in renamed) else NoHead()
        net = spec.build(domain, head)
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
