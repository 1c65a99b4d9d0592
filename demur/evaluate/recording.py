"""Run an attack on the net of a run and write the result as a record.

On a GPU the fast engine makes the adversarial examples. The net is evaluated on them at the end, in
fp32 and at one fixed batch size, so that records do not depend on how the attack was batched.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from demur import distributed
from demur.attacks import Attack, Clean, Corruption
from demur.attacks.attack_model import CheckedModel, Model
from demur.attacks.balls import L2, Linf
from demur.calibrate import ChanceTest
from demur.data import CIFAR10, Images, SplitName, Splits
from demur.data.corruptions import CorruptionSource, find_source
from demur.engine import FrozenModel, check_engine, compiler_for_attacks
from demur.errors import BadInput, suggestion
from demur.evaluate.binding import BoundSpec, resolve_thresholds
from demur.evaluate.probing import PROBED, probe
from demur.evaluate.resumable_batches import (
    FinishedBatches,
    ProgressCallback,
    attack_in_batches,
    default_batch_size,
)
from demur.files.checked_files import exclusive_lock, mapped
from demur.images import check_batch
from demur.nets import RejectingNet
from demur.numerics import Precision, device_by_name, fusing, raise_if_invalid, tf32, use_precision
from demur.output import Output, check_logits, outputs_in_batches, prediction
from demur.progress import ignore
from demur.rejectors import ImageRejector
from demur.rejectors.image_scores import FitImages, fit_on_images, image_rejectors, values_on_images
from demur.runs import Record, Records, Run, provenance
from demur.runs.record import (
    code_problem,
    finished_record,
    identity,
    move_record,
    read_record,
    record_path,
    write_record,
)
from demur.spec import digest, show
from demur.spec.code_digest import code_of, fingerprint
from demur.version import code_version

S = TypeVar("S")
VERDICT_BATCH = 256
CHANCE_IMAGES = 1000  # whose accuracy is compared with chance


@dataclass(frozen=True)
class RecordOptions:
    """Which images are attacked, how many at a time, and what the record stores.

    Attributes:
        split: Split of the data: fit, val, cal or test.
        n: Number of images, the first of the split; None attacks all of them.
        batch_size: Images per batch; None chooses by device. Records do not depend on it.
        keep_images: Number of adversarial examples to store in the record.
        keep_features: Whether to store features, which fitted rejectors need.
        rejectors: Image rejectors whose scores are stored, beside those of the attack.

    Example:
        >>> options = RecordOptions("test", n=20, keep_images=0)
    """

    split: str = "test"
    n: int | None = None
    batch_size: int | None = None
    keep_images: int = 256
    keep_features: bool = True
    rejectors: tuple[ImageRejector, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise BadInput(f"batch_size must be at least 1, not {self.batch_size}")
        if self.keep_images < 0:
            raise BadInput(f"keep_images must be 0 or more, not {self.keep_images}")


class LoadedRun:
    """A trained run opened for evaluation; the net and the data are loaded once, when needed.

    Args:
        run: A trained run, or an archive (which can be scored but not attacked).
        device: Device of the net: a torch.device, or its name (auto, cpu, cuda or cuda:1).
        data_folder: Folder of the data set; None searches the default locations.
        engine: auto, plain or fast; auto uses the fast engine on a GPU.
        on_message: Function that is called with each log sentence.

    Example:
        >>> loaded = LoadedRun(Run.open("digits-pgdat-rr"), "cpu")
        >>> x, y = loaded.splits["test"].batch(slice(0, 8))
        >>> loaded.net(x).logits.shape
        torch.Size([8, 10])
    """

    def __init__(
        self, run: Run, device: torch.device | str, data_folder: Path | None = None,
        engine: str = "auto", on_message: Callable[[str], None] = ignore,
    ) -> None:  # fmt: skip
        given: Any = device
        if not isinstance(given, torch.device | str):
            kind = type(given).__name__
            raise BadInput(f"device must be a torch.device or a name such as 'cpu', not {kind}")
        self.run = run
        self.device = device_by_name(device) if isinstance(device, str) else device
        self.data_folder, self.on_message = data_folder, on_message
        self.fast = check_engine(engine) != "plain" and self.device.type == "cuda"
        self._clean: dict[str, Record] = {}
        self._told: set[str] = set()  # digests of records that are left out
        self._own_net = ""  # fingerprint of the net as the recipe makes it
        self.split_digests: dict[str, str] = {}

    @cached_property
    def net(self) -> RejectingNet:
        """The trained net in eval mode; on a CPU in channels_last, which is faster there."""
        net = self.run.net(self.device)
        net.freeze_for_inference()
        if self.device.type == "cpu":
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._own_net = fingerprint(net)
        return net

    @property
    def model_key(self) -> str | None:
        """Digest of a net that the user has wrapped or changed; None for the run's own net.

        Records of the two are told apart by it, though they have the same recipe and weights.
        """
        if "net" not in vars(self) or (found := fingerprint(self.net)) == self._own_net:
            return None
        return found

    def fitted(self, spec: S) -> S:
        """The spec with its image rejectors fitted to the clean images of the fit split."""

        def images() -> FitImages:
            x, y = self.checked_split("fit").to(self.device).batch(slice(None))
            return self.net, x, self.clean("fit").output.to(self.device), y

        with tf32("fp32"):
            return fit_on_images(spec, images)

    def image_scores(
        self, rejectors: Sequence[ImageRejector], x: Tensor | FinishedBatches, out: Output
    ) -> dict[str, Tensor]:
        """Scores (N each, on the CPU) of images and the net's output for them, by their key."""
        scores = dict[str, Tensor]()
        for one in rejectors:
            parts = []
            for first in range(0, len(out.logits), VERDICT_BATCH):
                rows = slice(first, first + VERDICT_BATCH)
                batch = x[rows].to(self.device), out.select(rows).to(self.device)
                with tf32("fp32"), torch.no_grad():
                    parts.append(values_on_images(one, self.net, *batch).float().cpu())
            found = scores[one.key] = torch.cat(parts)
            raise_if_invalid(f"{type(one).__name__} score", found, "use -inf to reject an image")
        return scores

    def with_scores(self, record: Record, rejectors: Sequence[ImageRejector]) -> Record:
        """The record with the scores of image rejectors, as far as it has the images they see."""
        missing = [one for one in rejectors if one.key not in record.stored_scores]
        if not missing or record.scores_only or not self.run.has_weights:
            return record
        x = record.arrays.get("x_adv", record.y[:0])
        if record.metadata["attack"] == digest(Clean()):
            images = self.checked_split(record.metadata["split"])
            x = images.first(len(record.y)).batch(slice(None))[0]
        if len(x) < len(record.y):
            return record
        return record.with_stored(self.image_scores(missing, x, record.output))

    @property
    def precision(self) -> Precision:
        """Precision of the forward and backward passes of attacks: the training's, at most fp32."""
        trained_in = self.run.recipe.precision
        return trained_in if self.fast and trained_in != "fp64" else "fp32"

    @cached_property
    def frozen_model(self) -> FrozenModel:
        """The net as the fast engine runs it in attacks."""
        compiler = compiler_for_attacks(self.net, self.precision)
        return FrozenModel(self.net, self.precision, compiler, on_message=self.on_message)

    def craft(self, attack: Attack, images: Images, piece: slice, batch_size: int) -> Tensor:
        """Adversarial examples of a slice of the images, independent of the other images."""
        x, y, index = self.batch_in_layout(images, piece)
        if isinstance(attack, Corruption):
            return attack.corrupt(x, index, self.corruption_source(attack, images)).contiguous()
        plain = bool(image_rejectors(attack))  # the fast engine has no gradients of gradients
        with self.attack_model(batch_size, plain) as model:
            x_adv = attack.perturb(CheckedModel(model, x.dtype), x, y, index)
        return x_adv.contiguous()

    def corruption_source(self, attack: Corruption, images: Images) -> CorruptionSource:
        """Released files for test images of CIFAR-10 if they are found, else the generator."""
        first = CIFAR10.published.images - CIFAR10.published.layouts[0].parts[-1].images
        is_cifar = isinstance(self.run.recipe.data, CIFAR10) and int(images.index.min()) >= first
        return find_source(self.data_folder, attack.name, released=is_cifar)

    @contextmanager
    def attack_model(self, batch_size: int, plain: bool = False) -> Iterator[Model]:
        """Yield the model to attack, with the precision of attacks set."""
        if not self.fast or plain:
            with tf32("fp32"):
                yield self.net
            return
        self.frozen_model.set_max_batch(batch_size)
        compiles = self.frozen_model.compiler != "none"
        with use_precision(self.precision, self.device), fusing(compiles):
            yield self.frozen_model

    def batch_in_layout(
        self, images: Images, piece: slice | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels in the memory format of the engine, labels and indices of a slice of images."""
        x, y = images.batch(piece)
        on_cpu = self.device.type == "cpu"
        layout = torch.channels_last if self.fast or on_cpu else torch.contiguous_format
        return x.contiguous(memory_format=layout), y, images.index[piece]

    @cached_property
    def splits(self) -> Splits:
        """The data set by split, on the CPU."""
        return self.run.recipe.data.load(self.data_folder)

    def split_by_name(self, name: str) -> SplitName:
        """Split of that name; BadInput if it is unknown or the data set has none."""
        splits: tuple[SplitName, ...] = get_args(SplitName)
        found = next((split for split in splits if split == name), None)
        if found is None:
            raise BadInput(f"no split is called {name!r}; {suggestion(name, splits)}")
        if found not in (data := self.run.recipe.data).splits:
            raise BadInput(f"{show(data)} has no {name} images; train with split=held-out")
        return found

    def images(self, options: RecordOptions) -> Images:
        """Images to attack, on the device."""
        images = self.checked_split(options.split)
        return (images if options.n is None else images.first(options.n)).streamed(self.device)

    def checked_split(self, name: str) -> Images:
        """Images of a split; BadInput unless they have the pixels and labels of the training."""
        split = self.split_by_name(name)
        try:
            images = self.splits[split]
        except BadInput:
            self.run.check_weights()  # without weights the data would not help: report that first
            raise
        expected = self.run.checkpoint.get("data", {}).get(split)  # older runs have none
        found = self.split_digests[split] = self.split_digests.get(split) or images.digest()
        if expected not in (None, found):
            raise BadInput(
                f"the {split} images or labels are not those that {self.run.name} was trained "
                f"with: expected digest {expected[:16]}, found {found[:16]}; restore the data, or "
                "train again"
            )
        return images

    def usable_records(self, split: str) -> Records:
        """Records of this model whose attacks are of today's code; names the others once."""
        kept = Records()
        for record in self.run.records(split, self.model_key):
            if not (problem := code_problem(record)):
                kept.append(record)
            elif record.digest not in self._told:
                self._told.add(record.digest)
                self.on_message(f"without {record.label} (record {record.digest[:12]}): {problem}")
        return kept

    def clean(self, split: str, *rejectors: ImageRejector) -> Record:
        """Record of the clean images of a split, made if there is none, and cached.

        It has the scores of these image rejectors too.
        """
        at = f"{split} {self.model_key or ''}"
        if at not in self._clean and not self.run.has_weights:  # an archive: none can be made
            for record in self.run.records(split):
                if record.metadata.get("archive") and record.metadata["attack"] == digest(Clean()):
                    self._clean.setdefault(at, record)
        needed = {one.key for one in rejectors}
        if at not in self._clean or not needed <= {*self._clean[at].stored_scores}:
            options = RecordOptions(split, keep_images=0, rejectors=rejectors)
            self._clean[at] = run_attack(self, "clean", Clean(), options)
        return self._clean[at]

    def chance_test(self) -> ChanceTest:
        """Compare the accuracy on up to 1,000 test images with chance; makes no record."""
        images, right = self.checked_split("test"), 0
        rows = torch.arange(n := min(len(images), CHANCE_IMAGES)) * len(images) // n  # all classes
        for part in rows.split(VERDICT_BATCH):
            x, y, _ = self.batch_in_layout(images, part)
            with torch.no_grad(), tf32("fp32"):
                right += int((prediction(self.net(x)) == y).sum())
        labels, classes = images.y[rows].cpu().numpy(), self.run.recipe.data.domain.classes
        return ChanceTest.of(right, labels, classes, "test")


def run_attack(
    loaded: LoadedRun, label: str, attack: Attack, options: RecordOptions = RecordOptions(),
    on_progress: ProgressCallback = ignore,
) -> Record:  # fmt: skip
    """Run an attack and write its record, or read the record if it exists.

    Thresholds in the attack are chosen on clean images first (see resolve_thresholds). Finished
    batches are stored, so an interrupted attack resumes where it stopped.

    Args:
        loaded: The run to attack.
        label: Name of the record in tables and file names.
        attack: The attack; its rejectors need not be fitted.
        options: Which images to attack and what to store.
        on_progress: Function that is called with (images done, images in all).

    Returns:
        The record, which is also in the run's folder `records`.

    Example:
        >>> loaded = LoadedRun(Run.open("digits-pgdat-rr"), "cpu")
        >>> attack = PGD(Linf(0.15), steps=3)
        >>> record = run_attack(loaded, "pgd-3", attack, RecordOptions(n=20))
        >>> accuracy = record.correct.mean()
    """
    here, images = distributed.current(), loaded.images(options)
    attack = loaded.fitted(attack)
    bound = resolve_thresholds(attack, loaded.clean, loaded.device)
    rejectors = image_rejectors(attack, options.rejectors)
    making = _Recording(loaded, attack, images, options, bound, rejectors)
    inputs, folder = making.inputs(), loaded.run.records_folder
    key = identity(**inputs)
    if (finished := here.broadcast(making.finished(key))) is not None:
        return read_record(finished)
    for piece in images.slices(VERDICT_BATCH):
        classes = loaded.run.recipe.data.domain.classes
        check_batch(*images.batch(piece), classes, piece.start)
    spec = show(attack, full=True)
    metadata = {"label": label, "spec": spec, "digest": key, **inputs, **making.provenance()}
    half = folder / f".making-{key[:12]}"

    waiting = partial(loaded.on_message, "another process is making this record; waiting for it")
    with exclusive_lock(half, waiting) if here.is_leader else nullcontext():
        # the process that held the lock may have finished this record
        finished = here.broadcast(making.finished(key))
        if finished is None:
            started = perf_counter()
            x_adv = making.craft(half, on_progress)
            metadata["seconds"] = round(perf_counter() - started, 1)  # of this process alone
            if here.is_leader:
                finished = making.write(x_adv, metadata, half)
        if here.is_leader:
            shutil.rmtree(half, ignore_errors=True)
    written = here.broadcast(finished)
    assert written is not None
    return read_record(written)


@dataclass(frozen=True)
class _Recording:
    """One attack on some images of a run, and the record that is made of it."""

    loaded: LoadedRun
    attack: Attack
    images: Images
    options: RecordOptions
    bound: BoundSpec[Attack]
    rejectors: list[ImageRejector]  # whose scores the record stores

    def inputs(self) -> dict[str, Any]:
        """Everything that determines a record; the digest of these values identifies it."""
        loaded, options, whole = self.loaded, self.options, self.options.n is None
        inputs = {
            "attack": digest(self.attack),
            "thresholds": self.bound.thresholds,
            "fitted": self.bound.fitted,
            "weights": loaded.run.checkpoint["weights"],
            "data": loaded.split_digests[options.split] if whole else self.images.digest(),
            "split": options.split,
            "features": options.keep_features,
            "images": min(options.keep_images, len(self.images)),
        }
        if (model := loaded.model_key) is not None:
            inputs["model"] = model
        if code := code_of(self.attack, loaded.run.recipe.net):
            inputs["user_code"] = code
        if isinstance(self.attack, Corruption):
            inputs["source"] = loaded.corruption_source(self.attack, self.images).kind
        elif loaded.precision != "fp32" and not isinstance(self.attack, Clean):
            inputs["precision"] = loaded.precision
        return inputs

    def finished(self, key: str) -> Path | None:
        """Path of the finished record with all scores that are asked for; None without it."""
        path = finished_record(self.loaded.run.records_folder, self.options.split, key)
        known = read_record(path).stored_scores if path and self.rejectors else {}
        return path if all(one.key in known for one in self.rejectors) else None

    def provenance(self) -> dict[str, Any]:
        """Metadata that does not identify a record: time, recipe, engine, code and device."""
        run = self.loaded.run
        return {
            "n": len(self.images),
            "seed": getattr(self.attack, "seed", None),
            "epoch": run.checkpoint["epoch"],
            "recipe": show(run.recipe, full=True),
            "created": datetime.now(UTC).isoformat(timespec="microseconds"),
            "engine": "fast" if self.loaded.fast else "plain",
            "processes": distributed.current().size,
            **provenance(self.loaded.device),
        }

    def craft(self, folder: Path, on_progress: ProgressCallback) -> FinishedBatches:
        """Adversarial examples; finished batches are stored in folders by code version."""
        loaded, images = self.loaded, self.images
        if loaded.fast:
            loaded.frozen_model.drop_graphs()
        at = len(images), loaded.device, bool(image_rejectors(self.attack))
        size = self.options.batch_size or default_batch_size(*at)
        parts = folder / f"parts-{identity(code=code_version())[:12]}"
        craft = partial(loaded.craft, self.bound.spec, images)
        return attack_in_batches(craft, images, size, parts, on_progress)

    def write(self, x_adv: FinishedBatches, metadata: dict[str, Any], folder: Path) -> Path:
        """Evaluate the net on adversarial examples and write the record, first into `folder`.

        An earlier record that lacks the scores of image rejectors is replaced.
        """
        metadata["probe"] = probe(self.loaded.net, *self.images.batch(slice(PROBED)))
        records, split = self.loaded.run.records_folder, self.options.split
        record, known = Record(self._arrays(x_adv, folder), metadata), dict[str, Tensor]()
        if earlier := finished_record(records, split, metadata["digest"]):
            old = read_record(earlier)
            metadata["label"] = old.label
            if torch.equal(old.arrays["logits"], record.arrays["logits"]):
                known = old.stored_scores
        missing = [one for one in self.rejectors if one.key not in known]
        record = record.with_stored(known | self.loaded.image_scores(missing, x_adv, record.output))
        half = record_path(folder, metadata["label"], split, metadata["digest"])
        write_record(half, record)
        if earlier:  # arrays without metadata are no record, and their batches are still here
            earlier.with_suffix(".json").unlink()
        move_record(half, records)
        return records / half.name

    def _arrays(self, x_adv: FinishedBatches, folder: Path) -> dict[str, Tensor]:
        """Per-image arrays of a record, on the CPU; features and images are in files."""
        kept, n, columns = self.options.keep_images, len(self.images), list[Tensor]()
        with (folder / "feature").open("w+b") as features, (folder / "x_adv").open("w+b") as images:
            for piece in self.images.slices(VERDICT_BATCH):
                x, made = self.images.batch(piece)[0].cpu(), x_adv[piece]
                self.bound.spec.check_result(x, made)
                out, delta = final_outputs(self.loaded.net, made, self.loaded.device), made - x
                invalid = (part.isnan().any(1) for part in (out.feature, out.aux))
                parts = out.logits, out.aux, Linf(0).norm(delta), L2(0).norm(delta), *invalid
                # small tensors between the large ones of each batch would fragment memory
                columns = columns or [part.new_empty(n, *part.shape[1:]) for part in parts]
                for column, part in zip(columns, parts, strict=True):
                    column[piece] = part
                features.write(out.feature.numpy().data)
                images.write(made[: max(0, kept - piece.start)].numpy().data)
                del x, made, out, delta, parts  # before the next batch takes their memory
        logits, aux, linf, l2, *wrong = columns
        check_logits(Output(logits, logits, aux))
        for name, values in zip(("features", "auxiliary outputs"), wrong, strict=True):
            remedy = "train the net again, or check its weights"
            raise_if_invalid(name, values, remedy, invalid=Tensor.bool)
        arrays = {
            "y": self.images.y.cpu(), "index": self.images.index.cpu(), "logits": logits,
            "aux": aux, "size_linf": linf, "size_l2": l2,
        }  # fmt: skip
        if self.options.keep_features:
            arrays["feature"] = mapped(folder / "feature", n, -1)
        if kept:
            arrays["x_adv"] = mapped(folder / "x_adv", -1, *self.images.pixels.shape[1:])
        return arrays


def final_outputs(net: RejectingNet, x_adv: Tensor, device: torch.device) -> Output:
    """Outputs of the net in fp32; the last batch is padded, since kernels depend on the size."""
    missing = -len(x_adv) % VERDICT_BATCH
    padded = torch.cat([x_adv, x_adv.new_zeros(missing, *x_adv.shape[1:])])
    with tf32("fp32"):
        out = outputs_in_batches(net, padded, VERDICT_BATCH, device)
    return Output(*(part[: len(x_adv)] for part in out))
