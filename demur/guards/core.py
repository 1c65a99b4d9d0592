"""`Guard` and `guard`: how guards are made and stored."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demur.attacks.attack_model import Model
from demur.errors import BadInput, visible
from demur.evaluate import LoadedRun
from demur.evaluate.accepted_errors import aimed_rejector, clean_of, under_attack, worst_case_of
from demur.evaluate.binding import other_aim
from demur.evaluate.certificates import attack_under, attacked_cal
from demur.evaluate.record_scores import accepted as accepted_in
from demur.evaluate.record_scores import can_score
from demur.guards.bundle import load, save
from demur.guards.calibration import (
    OVERRIDE,
    GuardScore,
    calibrate,
    decision_figures,
    fit_rejector,
    guarantee_of,
    on_device,
    shown_temperature,
)
from demur.guards.decision import BATCH_SIZE, BaseGuard, BuiltFrom
from demur.guards.export import export_onnx
from demur.guards.inputs import Shape, image_digests, read_images
from demur.images import check_batch
from demur.methods import Head
from demur.nets import NetSpec
from demur.output import Output, outputs_in_batches
from demur.recipes import AnyName, as_rejector, rejectors_named
from demur.rejectors import Rejector
from demur.rejectors.image_scores import FitImages, add_columns, fit_on_images, image_rejectors
from demur.rejectors.rule import Rule
from demur.runs import Run
from demur.spec import check_readable, show
from demur.spec.code_digest import score_key
from demur.spec.field_types import Positive, UnitInterval, convert_value


@dataclass(frozen=True, repr=False)
class Guard(BaseGuard):
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
        calibration: How the thresholds were chosen, and rates on the calibration images.
        reported_rates: Rates on other images, such as attacked ones, for the model card.
        eps: Linf radius at which the service's page attacks an image.
        built_from: The specs that rebuild the model, or None for a foreign one.
        name: What the guard is called in answers, logs and metrics.
        version: Its number; recalibration counts it up.
        training_images: Digests of the fit and val images of its run, sorted; None if unknown.

    Example:
        >>> import torch
        >>> from demur import guard
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> x, y = torch.rand(200, 1, 8, 8), torch.arange(200) % 10
        >>> guarded = guard(net, x, y, accept_chance=True)
        >>> guarded(x[:5]).accepted.shape
        (5,)
    """

    def save(
        self, folder: str | Path, *, factory: str | None = None, onnx: bool = False,
        sign: str | Path | None = None,
    ) -> Path:  # fmt: skip
        """Write the guard to a folder in the layout of the Hugging Face Hub.

        Args:
            folder: A new folder, or one that holds a guard, which is replaced.
            factory: "module:function" that returns a module like the model without its weights;
                needed for a model that demur did not build, unless `Guard.load` is given one.
            onnx: Whether the folder also holds model.onnx.
            sign: A private key in a PEM file, which signs the folder; needs model-signing.

        Returns:
            The folder: model.safetensors, config.json and the model card README.md.
        """
        return save(self, Path(folder), factory, onnx, sign)

    @staticmethod
    def load(
        folder: str | Path, *, model: nn.Module | None = None, device: str = "cpu",
        public_key: str | Path | None = None,
    ) -> "Guard":  # fmt: skip
        """Read a guard from a folder, without pickle and without code from the folder.

        Args:
            folder: A folder that `save` wrote.
            model: A module that the weights are loaded into; needed for a foreign model that was
                saved without a factory.
            device: Device of the model: auto, cpu, cuda or cuda:N.
            public_key: A public key in a PEM file that must have signed the folder; None asks
                for no signature.

        Returns:
            The guard. BadInput is raised if a file is missing, changed or does not fit.
        """
        return Guard(**vars(load(Path(folder), model, device, public_key)))

    @staticmethod
    def from_run(
        run: Run | LoadedRun | str | Path, *, rejector: AnyName | None = None,
        tpr: float | None = None, coverage: float | None = None, risk: float | None = None,
        confidence: float = 0.95, class_names: Sequence[str] | None = None,
        resize: bool | None = None, device: str = "auto", data_folder: Path | None = None,
        accept_chance: bool = False, under: str = "clean",
    ) -> "Guard":  # fmt: skip
        """Make a guard from a trained run, calibrated on the cal images of its data set.

        Args:
            run: A run, or its name or folder.
            rejector: A name, a spec as text, a class or an instance; None takes the head's or Con.
            tpr: Accept at least this share of the correct predictions; the default, with 0.95.
            coverage: Accept at least this share of all images.
            risk: Accept at most this share of errors among the accepted.
            confidence: Confidence of the guarantee.
            class_names: None takes those of the data set.
            resize: Resize images of another size; None does what the data set did.
            device: Device of the model: auto, cpu, cuda or cuda:N.
            data_folder: Folder of the data set.
            accept_chance: Make a guard of a net that is not shown to be better than chance.
            under: "clean", or "worst-score" to guarantee a risk under that attack.

        Returns:
            The guard, whose model card has the figures of the run's records. BadInput is raised
            if the test accuracy is not above chance and the largest class (exact test, 99%).
        """
        guarantee = guarantee_of(tpr, coverage, risk)
        run = Run.open(str(run)) if isinstance(run, str | Path) else run
        loaded = run if isinstance(run, LoadedRun) else LoadedRun(run, device, data_folder)
        recipe = loaded.run.recipe
        loaded.run.check_weights()
        rejector = rejector or recipe.head_rejector[0]
        (spec,) = rejectors_named(rejector, recipe).values()
        check_readable(spec)
        spec = loaded.fitted(spec)
        chance = loaded.chance_test()
        if not (chance.passed or accept_chance):
            raise BadInput(f"{chance.advice}; {OVERRIDE}")

        def fit() -> tuple[Output, Tensor]:
            return (clean := loaded.clean("fit")).output, clean.y

        own = tuple(image_rejectors(spec))
        cal, fitted = loaded.clean("cal", *own), fit_rejector(spec, fit)
        record = attacked_cal(loaded, *attack_under(loaded, under, rejector), own)
        attacked = {} if record is cal else under_attack(spec, fitted, record, cal)
        out = add_columns(cal.output, [cal.stored_scores[one.key] for one in own])
        calibrated = calibrate(spec, fitted, out, cal.y, guarantee, confidence, attacked, True)
        scores, domain = on_device(calibrated.scores, loaded.device), recipe.data.domain
        return Guard(
            loaded.net, scores, domain.shape,
            _names(class_names or recipe.data.class_names, domain.classes), shown_temperature(spec),
            recipe.data.resizes if resize is None else resize,
            calibration=calibrated.figures | {"chance_test": chance.to_json()},
            reported_rates=_record_rates(loaded, scores, spec),
            eps=recipe.data.threat.linf, built_from=BuiltFrom(recipe.net, recipe.method.head),
            name=visible(loaded.run.name)[:64], training_images=_training_images(loaded),
        )  # fmt: skip

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
        return export_onnx(self, Path(path))


def guard(
    model: Model, x_cal: Any, y_cal: Any, *, rejector: AnyName = "Con",
    tpr: float | None = None, coverage: float | None = None, risk: float | None = None,
    confidence: float = 0.95, x_fit: Any = None, y_fit: Any = None,
    class_names: Sequence[str] | None = None, mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None, resize: bool = False, temperature: float | None = None,
    eps: float = 8 / 255, built_from: tuple[NetSpec, Head] | None = None,
    accept_chance: bool = False,
) -> Guard:  # fmt: skip
    """Calibrate a rejector of any classifier on held-out images and return the guard.

    A TPR or a coverage is certified where the images suffice; otherwise the threshold is
    empirical, and `certificate` is None. A risk is always certified.

    Args:
        model: Images N, C, H, W in [0, 1] to logits or an Output; set to eval mode.
        x_cal: Calibration images, clean and not used in training, in any form that `Guard` reads.
        y_cal: Their labels, N.
        rejector: A rejector, its class, or its text such as "RCon(tau=0.5)" or "myrej:Gini".
        tpr: Accept at least this share of the correct predictions; the default, with 0.95.
        coverage: Accept at least this share of all images.
        risk: Accept at most this share of errors among the accepted.
        confidence: Confidence of the guarantee.
        x_fit: Images that a rejector is fitted to which needs it, such as KD; not `x_cal`.
        y_fit: Their labels.
        class_names: Names of the classes; "0", "1", ... by default.
        mean: Mean of each channel, subtracted before the model; None if the model normalises.
        std: Standard deviation of each channel, divided by before the model.
        resize: Resize images of another size instead of raising BadInput.
        temperature: Softmax temperature of the class probabilities; None takes the rejector's.
        eps: Linf radius at which the service's page attacks an image.
        built_from: The net and head specs that the model was built from.
        accept_chance: Make a guard of a model that is not shown to be better than chance.

    Returns:
        The guard. Uncertified is raised if a risk cannot be certified, BadInput at chance level.

    Example:
        >>> import torch
        >>> from demur import guard
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> x, y = torch.rand(300, 1, 8, 8), torch.arange(300) % 10
        >>> guarded = guard(net, x, y, rejector="Energy", accept_chance=True)
    """
    guarantee, spec = guarantee_of(tpr, coverage, risk), as_rejector(rejector)
    check_readable(spec)
    spec, uncalibrated = _uncalibrated(spec, model, x_cal, mean, std, x_fit, y_fit)
    out, y = outputs_of(uncalibrated, x_cal, y_cal)
    fit = None if x_fit is None else lambda: outputs_of(uncalibrated, x_fit, y_fit)
    about = spec, fit_rejector(spec, fit), out, y, guarantee, confidence
    found = calibrate(*about, accept_chance=accept_chance)
    temperature = shown_temperature(spec) if temperature is None else temperature
    return replace(
        uncalibrated, scores=on_device(found.scores, uncalibrated.device), resize=resize,
        calibration=found.figures, class_names=_names(class_names, out.logits.shape[1]),
        eps=float(convert_value(eps, UnitInterval, "eps")),
        temperature=float(convert_value(temperature, Positive, "temperature")),
        built_from=BuiltFrom(*built_from) if built_from else None,
    )  # fmt: skip


def _uncalibrated(
    spec: Rejector, model: Model, x_cal: Any, mean: Sequence[float] | None,
    std: Sequence[float] | None, x_fit: Any, y_fit: Any,
) -> tuple[Rejector, Guard]:  # fmt: skip
    """The spec with its image rejectors fitted, and a guard whose outputs have their scores."""
    if (mean is None) != (std is None):
        raise BadInput("only one of mean and std is given; give both, or neither")
    if isinstance(model, nn.Module):
        model.eval()
    shape = _shape_of(x_cal)
    means, stds = _per_channel(mean, shape), _per_channel(std, shape)
    guard = Guard(model, (), shape, (), mean=means, std=stds)

    def images() -> FitImages:
        if x_fit is None:
            raise BadInput(f"{show(spec)} is fitted to images; give x_fit and y_fit")
        x = read_images(x_fit, guard.shape, resize=False).x
        return guard.net_output, x, *outputs_of(guard, x_fit, y_fit)

    fitted = fit_on_images(spec, images)
    columns = tuple(GuardScore(one, one, -math.inf) for one in image_rejectors(fitted))
    return fitted, replace(guard, scores=columns)


def _record_rates(
    loaded: LoadedRun, scores: tuple[GuardScore, ...], spec: Rejector
) -> tuple[dict[str, Any], ...]:
    """Rates of the decisions on the run's test records, clean and attacked."""
    rule = Rule(tuple((part.score, part.threshold) for part in scores))
    found = []
    records = loaded.usable_records("test")
    own = image_rejectors(*(part.rejector for part in scores))
    at = [part.threshold for part in scores]
    for stored in records:
        record = loaded.with_scores(stored, own)
        if not all(can_score(part.score, record) for part in scores):
            continue
        accept, correct = accepted_in(rule, record), record.correct
        if aim := aimed_rejector(record):  # the record mixes clean and attacked images
            clean = clean_of(record, records)
            if clean is None or aim != score_key(spec):
                continue
            clean = loaded.with_scores(clean, own)
            case = worst_case_of(scores[0].score, record, clean)
            right = clean.correct[: len(record.y)]
            accept, correct = case.accepted >= at[0], right & (case.worst < at[0])
        decided = decision_figures(accept, correct)
        about = {"attack": record.label, "spec": record.metadata["spec"]}
        found.append({**about, "aim": other_aim(record, spec, at), **decided})
    return tuple(found)


def _training_images(loaded: LoadedRun) -> Tensor:
    """Sorted digests of the images that trained the net or selected its epoch."""
    names = {"fit", "val"}.intersection(loaded.run.recipe.data.splits)
    splits = map(loaded.checked_split, names)
    parts = [image_digests(one.batch(rows)[0]) for one in splits for rows in one.slices(BATCH_SIZE)]
    return torch.cat(parts).sort().values


def _shape_of(x_cal: Any) -> Shape:
    """C, H, W of calibration images: tensors have the channels first, arrays last."""
    is_array = isinstance(x_cal, Tensor | np.ndarray)
    if not is_array or x_cal.ndim != 4:
        found = f"has shape {tuple(x_cal.shape)}" if is_array else f"is {type(x_cal).__name__}"
        raise BadInput(f"x_cal {found}; give a tensor N, C, H, W or an array N, H, W, C")
    a, b, c = (int(size) for size in x_cal.shape[1:])
    channels_last = isinstance(x_cal, np.ndarray) and not (a in (1, 3) and c not in (1, 3))
    return (c, a, b) if channels_last else (a, b, c)


def outputs_of(guard: Guard, images: Any, labels: Any) -> tuple[Output, Tensor]:
    """Return outputs for images and their labels, on the CPU; BadInput if they do not match."""
    x = read_images(images, guard.shape, resize=False).x
    if labels is None:
        raise BadInput("labels are missing; give one per image")
    y = torch.as_tensor(labels).cpu().long()
    out = outputs_in_batches(guard.output, x, BATCH_SIZE, guard.device)
    check_batch(x.cpu(), y, out.logits.shape[1])
    return out, y


def _names(given: Sequence[str] | None, classes: int) -> tuple[str, ...]:
    names = tuple(str(i) for i in range(classes)) if given is None else tuple(given)
    if isinstance(given, str) or not all(names):
        raise BadInput("class_names must be a list of words, one per class")
    if not all(str(name).isprintable() for name in names):  # may hold escapes for a terminal
        raise BadInput("class_names holds a name that cannot be printed; rename the class")
    if not len(names) == len(set(names)) == classes:
        found = f"{len(names)} names, {len(set(names))} of them different"
        raise BadInput(f"class_names has {found}, for {classes} classes; give one name per class")
    return names


def _per_channel(values: Sequence[float] | None, shape: Shape) -> tuple[float, ...] | None:
    """One finite number per channel, or None."""
    if values is None:
        return None
    found = tuple(float(value) for value in values)
    if len(found) != shape[0] or not all(np.isfinite(found)):
        raise BadInput(f"mean and std must have {shape[0]} numbers, one per channel, not {found}")
    return found
