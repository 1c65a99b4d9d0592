"""Pack a run for work on rejectors: outputs, labels and features of its first images, no weights.

    pack(loaded, Path("packs/pgdat-rr"), count=1000)
    RejectorEvaluation.of(LoadedRun(Run.open("packs/pgdat-rr"), "cpu"), rejectors={"mine": Mine()})

Features are stored in half precision. A clean fit record of as many images is added, on which
rejectors are fitted, so a new rejector gets its rows without the net and without the data.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from demur.attacks import Clean
from demur.errors import BadInput
from demur.evaluate.archive import check_replaceable, write_archive
from demur.evaluate.attack import LoadedRun, RecordOptions, no_progress, run_attack
from demur.runs import Record, Run
from demur.runs.files import replace_folder
from demur.runs.record import identity

PACKED_ARRAYS = ("y", "index", "size_linf", "size_l2", "logits", "aux", "feature")


def pack(
    loaded: LoadedRun,
    target: Path,
    count: int = 1000,
    on_progress: Callable[[int, int], None] = no_progress,
) -> Run:
    """Write the pack of a run.

    Args:
        loaded: The run, with weights; the clean fit record is made if it has none.
        target: Folder to write, which must not exist.
        count: Images of each record, the first ones.
        on_progress: Function that is called with (records done, records in all).

    Returns:
        The pack as a run without weights.

    Raises:
        BadInput: The target exists, the count is not positive, or no record has features.
    """
    if count < 1:
        raise BadInput(f"a pack needs at least 1 image of each record, not {count}")
    with replace_folder(target) as (half, resolved):
        check_replaceable(resolved, loaded.run, again=False)
        records, packed = _records(loaded, count), list[Record]()
        for done, record in enumerate(records):
            on_progress(done, len(records))
            packed.append(_packed(record, count))
        on_progress(len(records), len(records))
        write_archive(loaded.run, packed, {}, half)
    return Run(target)


def _records(loaded: LoadedRun, count: int) -> list[Record]:
    """The records with features, and a clean one of the fit split."""
    splits = [split for split in loaded.run.recipe.data.splits if split != "fit"]
    records = [one for split in splits for one in loaded.run.records(split) if _has_features(one)]
    if not any(record.metadata["split"] == "test" for record in records):
        raise BadInput(
            f"{loaded.run.path} has no test record with features; make one with demur attack "
            "where the weights are"
        )
    fit = loaded.splits["fit"]
    options = RecordOptions("fit", n=min(count, len(fit)), keep_images=0)
    records = [run_attack(loaded, "clean", Clean(), options), *records]
    if "cal" in splits:
        records.append(loaded.clean("cal"))
    return list({record.digest: record for record in records}.values())


def _has_features(record: Record) -> bool:
    return bool(record.metadata["features"])


def _packed(record: Record, count: int) -> Record:
    """The first images of a record, features in half precision."""
    arrays = {name: record.arrays[name][:count].clone() for name in PACKED_ARRAYS}
    arrays["feature"] = _half(arrays["feature"])
    metadata: dict[str, Any] = record.metadata | {"archive": True, "images": 0}
    if len(arrays["y"]) < len(record.y):  # another set of images is another record
        short = identity(first=len(arrays["y"]), of=record.digest)
        metadata |= {"n": len(arrays["y"]), "digest": short, "first_of": record.digest}
    return Record(arrays, metadata)


def _half(feature: Tensor) -> Tensor:
    """Half precision, unless a value is too large for it."""
    half = feature.half()
    return feature if half.isinf().any() else half
