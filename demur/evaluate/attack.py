"""Run an attack on a run's net and keep what came of it as a record.

    record = attacked(Evaluator(run, device), "pgd-20", PGD(Linf(0.15), steps=20))

The images are made by the fast engine where there is one. The verdicts are taken at the end, in
fp32 and at one fixed batch size, on exactly the images that were made.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from demur import distributed
from demur.attacks import Attack, Clean
from demur.balls import L2, Linf
from demur.data import Images, SplitName, Splits
from demur.engine import FrozenModel, check_engine, compiler_for_attacks
from demur.errors import BadInput, suggestion
from demur.evaluate.batching import Watch, attack_in_batches, default_batch_size
from demur.evaluate.binding import BoundSpec, bind_thresholds
from demur.evaluate.model_probe import probe
from demur.fused import fusing
from demur.gradient import Model
from demur.images import check_batch
from demur.nets import RejectingNet
from demur.output import Output
from demur.precision import Precision, tf32, use_precision
from demur.runs import Record, Run, provenance
from demur.runs.files import exclusive_lock
from demur.runs.record import (
    finished_record,
    identity,
    move_record,
    read_record,
    record_path,
    write_record,
)
from demur.spec import digest, show
from demur.version import code_version

VERDICT_BATCH = 256


def no_progress(done: int, total: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True)
class AttackOptions:
    """Which images an attack is run on, how many at a time, and what is kept."""

    split: str = "test"
    n: int | None = None
    batch_size: int | None = None  # None: what suits the device
    keep_images: int = 256
    keep_features: bool = True

    def check(self) -> None:
        """Refuse numbers that make no sense."""
        if self.batch_size is not None and self.batch_size < 1:
            raise BadInput(f"the batch size must be at least 1, not {self.batch_size}")
        if self.keep_images < 0:
            raise BadInput(f"the number of images kept must be 0 or more, not {self.keep_images}")


class Evaluator:
    """A finished run opened for evaluation: its net and splits, loaded once."""

    def __init__(
        self,
        run: Run,
        device: torch.device,
        data_folder: Path | None = None,
        engine: str = "auto",
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.run, self.device, self.data_folder, self.say = run, device, data_folder, say
        self.fast = check_engine(engine) != "plain" and device.type == "cuda"
        self._clean: dict[str, Record] = {}

    @cached_property
    def net(self) -> RejectingNet:
        """The trained net in eval mode; on a CPU in the layout that suits its convolutions."""
        net = self.run.net(self.device)
        net.freeze_for_inference()
        if self.device.type == "cpu":
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net

    @property
    def precision(self) -> Precision:
        """The arithmetic in which attacks are made."""
        trained_in = self.run.recipe.precision  # a net is evaluated in fp32 at most
        return trained_in if self.fast and trained_in != "fp64" else "fp32"

    @cached_property
    def frozen_model(self) -> FrozenModel:
        """The net as the fast engine hands it to attacks."""
        compiler = compiler_for_attacks(self.net, self.precision)
        return FrozenModel(self.net, self.precision, compiler, say=self.say)

    def craft(self, attack: Attack, images: Images, piece: slice, batch_size: int) -> Tensor:
        """Attacked images of one piece; nothing in it depends on the rest of the order."""
        with self.crafting(batch_size) as model:
            return attack.perturb(model, *self.laid_out(images, piece)).contiguous()

    @contextmanager
    def crafting(self, batch_size: int) -> Iterator[Model]:
        """The net as attacks see it, in the arithmetic they are made in."""
        if not self.fast:
            with tf32("fp32"):
                yield self.net
            return
        self.frozen_model.set_max_batch(batch_size)
        compiles = self.frozen_model.compiler != "none"
        with use_precision(self.precision, self.device), fusing(compiles):
            yield self.frozen_model

    def laid_out(self, images: Images, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels as the engine wants them, labels and indices of one piece."""
        x, y = images.batch(piece)
        on_cpu = self.device.type == "cpu"
        layout = torch.channels_last if self.fast or on_cpu else torch.contiguous_format
        return x.contiguous(memory_format=layout), y, images.index[piece]

    @cached_property
    def splits(self) -> Splits:
        """The data, on the CPU."""
        return self.run.recipe.data.load(self.data_folder)

    def split_by_name(self, name: str) -> SplitName:
        """The split of that name; one that is not there is refused."""
        splits: tuple[SplitName, ...] = get_args(SplitName)
        found = next((split for split in splits if split == name), None)
        if found is None:
            raise BadInput(f"no split is called {name!r}; {suggestion(name, splits)}")
        if found not in self.run.recipe.data.splits:
            data = show(self.run.recipe.data)
            raise BadInput(f"{data} keeps no {name} images; train with split=held-out")
        return found

    def images(self, options: AttackOptions) -> Images:
        """The images that were ordered, on the device."""
        split = self.split_by_name(options.split)
        try:
            whole = self.splits[split]
        except BadInput:
            self.run.check_weights()  # where they are gone too, data would not help
            raise
        return (whole if options.n is None else whole.first(options.n)).to(self.device)

    def clean(self, split: str) -> Record:
        """The clean record of a split, made if it is not there and read only once."""
        if split not in self._clean and (kept := self._slim(split)) is not None:
            self._clean[split] = kept
        if split not in self._clean:
            options = AttackOptions(split, keep_images=0, keep_features=True)
            self._clean[split] = run_attack(self, "clean", Clean(), options)
        return self._clean[split]

    def _slim(self, split: str) -> Record | None:
        """The clean record of an archived run, which has no weights to make another."""
        if self.run.finished:
            return None
        known = digest(Clean())
        records = (r for r in self.run.records(split) if r.metadata.get("archive"))
        return next((r for r in records if r.metadata["attack"] == known), None)


def run_attack(
    evaluator: Evaluator,
    label: str,
    attack: Attack,
    options: AttackOptions = AttackOptions(),
    watch: Watch = no_progress,
) -> Record:
    """The record of an attack, read if it exists, else made."""
    options.check()
    here, images = distributed.current(), evaluator.images(options)
    bound = bind_thresholds(attack, evaluator.clean, evaluator.device)
    asked = _asked(evaluator, attack, bound, images, options)
    key = identity(**asked)
    folder = evaluator.run.records_folder
    if (made := here.broadcast(finished_record(folder, options.split, key))) is not None:
        return read_record(made)
    x, y = images.batch(slice(None))
    check_batch(x, y, evaluator.run.recipe.data.domain.classes)
    spec = show(attack, full=True)
    about = {
        "label": label,
        "spec": spec,
        "digest": key,
        **asked,
        **_story(evaluator, attack, images),
    }
    making = folder / f".making-{key[:12]}"
    with exclusive_lock(making, _waiting(evaluator)) if here.is_leader else nullcontext():
        made = here.broadcast(
            finished_record(folder, options.split, key)
        )  # by whoever was waited for
        if made is None:
            x_adv = _crafted(evaluator, bound.spec, images, options, making, watch)
            if here.is_leader:
                about["probe"] = probe(evaluator.net, x, y)
                half = record_path(making, label, options.split, key)
                write_record(
                    half, Record(_answers(evaluator.net, x, x_adv, images, options), about)
                )
                move_record(half, folder)
        if here.is_leader:
            shutil.rmtree(making, ignore_errors=True)
    here.barrier()
    return read_record(made or record_path(folder, label, options.split, key))


def _waiting(evaluator: Evaluator) -> Callable[[Path], None]:
    """Says what is waited for; other records of the run can be made at the same time."""
    return lambda folder: evaluator.say("another process is making this record; waiting for it")


def _crafted(
    evaluator: Evaluator,
    attack: Attack,
    images: Images,
    options: AttackOptions,
    folder: Path,
    watch: Watch,
) -> Tensor:
    """All attacked images; batches lie in the folder meanwhile, by the code that made them."""
    if evaluator.fast:
        evaluator.frozen_model.forget()
    size = options.batch_size or default_batch_size(len(images), evaluator.device)
    parts = folder / f"parts-{identity(code=code_version())[:12]}"
    return attack_in_batches(partial(evaluator.craft, attack, images), images, size, parts, watch)


def _asked(
    evaluator: Evaluator,
    attack: Attack,
    bound: BoundSpec[Attack],
    images: Images,
    options: AttackOptions,
) -> dict[str, Any]:
    """All that a record depends on: another one of the same need not be made."""
    asked = {
        "attack": digest(attack),
        "thresholds": bound.thresholds,
        "fitted": bound.fitted,
        "weights": evaluator.run.checkpoint["weights"],
        "data": images.digest(),
        "split": options.split,
        "features": options.keep_features,
        "images": min(options.keep_images, len(images)),
    }
    if evaluator.precision != "fp32" and not isinstance(attack, Clean):
        asked["precision"] = evaluator.precision
    return asked


def _story(evaluator: Evaluator, attack: Attack, images: Images) -> dict[str, Any]:
    """How a record came about: when, of which net, by what code and machine."""
    return {
        "n": len(images),
        "seed": getattr(attack, "seed", None),
        "epoch": evaluator.run.checkpoint["epoch"],
        "recipe": show(evaluator.run.recipe, full=True),
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "engine": "fast" if evaluator.fast else "plain",
        "processes": distributed.current().size,
        **provenance(evaluator.device),
    }


def _answers(
    net: RejectingNet, x: Tensor, x_adv: Tensor, images: Images, options: AttackOptions
) -> dict[str, Tensor]:
    """The per-image arrays of a record."""
    out = _verdicts(net, x_adv, x.device)
    delta = x_adv - x.cpu()
    arrays = {
        "y": images.y.cpu(),
        "index": images.index.cpu(),
        "logits": out.logits,
        "aux": out.aux,
        "size_linf": Linf(0).size(delta),
        "size_l2": L2(0).size(delta),
    }
    if options.keep_features:
        arrays["feature"] = out.feature
    if options.keep_images:
        arrays["x_adv"] = x_adv[: options.keep_images].clone()
    return arrays


def _verdicts(net: RejectingNet, x_adv: Tensor, device: torch.device) -> Output:
    """The net's answers in fp32 at one batch size, the last batch padded to it."""
    missing = -len(x_adv) % VERDICT_BATCH
    padded = torch.cat([x_adv, x_adv.new_zeros(missing, *x_adv.shape[1:])])
    with torch.no_grad(), tf32("fp32"):
        batches = [net(batch.to(device)) for batch in padded.split(VERDICT_BATCH)]
    return Output(*(torch.cat(part)[: len(x_adv)].cpu() for part in zip(*batches, strict=True)))
