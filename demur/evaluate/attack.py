"""Run an attack on a run's net and keep what came of it as a record.

    record = attacked(Source(run, device), "pgd-20", PGD(Linf(0.15), steps=20))

Every finished batch is kept, so a killed attack goes on where it stopped. The verdicts are taken
at the end, in fp32 and at one fixed batch size, on exactly the images that were made.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import cast, get_args

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from demur.attacks import Attack, Clean
from demur.balls import L2, Linf
from demur.batch import check_batch
from demur.data import Images, SplitName, Splits
from demur.device import full_precision
from demur.errors import BadInput, suggestion
from demur.evaluate.binding import bind
from demur.nets import RejectingNet
from demur.output import Output
from demur.runs import Record, Run, code_version, provenance
from demur.runs.files import content_digest, write_bytes
from demur.runs.record import finished_record, identity, read_record, record_path, write_record
from demur.spec import digest, show

VERDICT_BATCH = 256

Watch = Callable[[int, int], None]  # images done, images in all


def unwatched(done: int, total: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True)
class Order:
    """Which images an attack is run on, how many at a time, and what is kept."""

    split: str = "test"
    n: int | None = None
    batch_size: int = 256
    keep_images: int = 256
    keep_features: bool = False

    def check(self) -> None:
        """Refuse numbers that make no sense."""
        if self.batch_size < 1:
            raise BadInput(f"the batch size must be at least 1, not {self.batch_size}")
        if self.keep_images < 0:
            raise BadInput(f"the number of images kept must be 0 or more, not {self.keep_images}")


class Source:
    """A finished run opened for evaluation: its net and splits, loaded once."""

    def __init__(self, run: Run, device: torch.device, data_folder: Path | None = None) -> None:
        self.run, self.device, self.data_folder = run, device, data_folder
        self._clean: dict[str, Record] = {}

    @cached_property
    def net(self) -> RejectingNet:
        """The trained net in eval mode."""
        return self.run.net(self.device)

    @cached_property
    def splits(self) -> Splits:
        """The data, on the CPU."""
        return self.run.recipe.data.load(self.data_folder)

    def images(self, order: Order) -> Images:
        """The images that were ordered, on the device."""
        if order.split not in get_args(SplitName):
            known = suggestion(order.split, get_args(SplitName))
            raise BadInput(f"no split is called {order.split!r}; {known}")
        whole = self.splits[cast(SplitName, order.split)]
        return (whole if order.n is None else whole.first(order.n)).to(self.device)

    def clean(self, split: str) -> Record:
        """The clean record of a split, made if it is not there and read only once."""
        if split not in self._clean:
            order = Order(split, keep_images=0, keep_features=True)
            self._clean[split] = attacked(self, "clean", Clean(), order)
        return self._clean[split]


def attacked(
    source: Source,
    label: str,
    attack: Attack,
    order: Order = Order(),
    watch: Watch = unwatched,
) -> Record:
    """The record of an attack, read if it exists, else made."""
    order.check()
    images = source.images(order)
    bound = bind(attack, source.clean)
    asked = {
        "attack": digest(attack),
        "thresholds": bound.thresholds,
        "fitted": bound.fitted,
        "weights": source.run.chosen["weights"],
        "data": images.digest(),
        "split": order.split,
        "features": order.keep_features,
        "images": min(order.keep_images, len(images)),
    }
    key = identity(**asked)
    folder = source.run.records_folder
    made = finished_record(folder, order.split, key)
    if made is not None:
        return read_record(made)
    x, y = images.batch(slice(None))
    check_batch(x, y, source.run.recipe.data.domain.classes)
    about = {
        "label": label,
        "spec": show(attack, full=True),
        "digest": key,
        **asked,
        "n": len(images),
        "seed": getattr(attack, "seed", None),
        "epoch": source.run.chosen["epoch"],
        "recipe": show(source.run.recipe, full=True),
        "made": datetime.now(UTC).isoformat(timespec="microseconds"),
        **provenance(source.device),
    }
    parts = folder / f".parts-{identity(asked=key, code=code_version())[:12]}"
    with source.run.writing():
        x_adv = _all_batches(source.net, bound.spec, images, order.batch_size, parts, watch)
        record = Record(_answers(source.net, x, x_adv, images, order), about)
        write_record(record_path(folder, _file_name(label), order.split, key), record)
        shutil.rmtree(parts, ignore_errors=True)
    return record


def _all_batches(
    net: RejectingNet, attack: Attack, images: Images, batch_size: int, parts: Path, watch: Watch
) -> Tensor:
    """Attacked images of the whole order; each batch is kept on disk as soon as it is done."""
    made = []
    for chosen in images.slices(batch_size):
        name = f"{chosen.start}-{chosen.stop}"
        x_adv = _kept(parts, name)
        if x_adv is None:
            x, y = images.batch(chosen)
            x_adv = attack.perturbed(net, x, y, images.index[chosen]).cpu()
            content = bytes_of({"x_adv": x_adv.contiguous()})
            write_bytes(parts / f"{name}-{content_digest(content)[:16]}", content)
        made.append(x_adv)
        watch(chosen.stop, len(images))
    return torch.cat(made)


def _kept(parts: Path, name: str) -> Tensor | None:
    """A batch that an earlier call finished, if it is there and undamaged."""
    for path in parts.glob(f"{name}-*"):
        content = path.read_bytes()
        if path.name == f"{name}-{content_digest(content)[:16]}":
            return tensors_of(content)["x_adv"]
    return None


def _answers(
    net: RejectingNet, x: Tensor, x_adv: Tensor, images: Images, order: Order
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
    if order.keep_features:
        arrays["feature"] = out.feature
    if order.keep_images:
        arrays["x_adv"] = x_adv[: order.keep_images].clone()
    return arrays


def _verdicts(net: RejectingNet, x_adv: Tensor, device: torch.device) -> Output:
    """The net's answers in fp32 at one batch size, the last batch padded to it."""
    missing = -len(x_adv) % VERDICT_BATCH
    padded = torch.cat([x_adv, x_adv.new_zeros(missing, *x_adv.shape[1:])])
    with torch.no_grad(), full_precision():
        batches = [net(batch.to(device)) for batch in padded.split(VERDICT_BATCH)]
    return Output(*(torch.cat(part)[: len(x_adv)].cpu() for part in zip(*batches, strict=True)))


def _file_name(label: str) -> str:
    """The label with letters, digits, dots, dashes and underscores only, and not too long."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label)[:80]
