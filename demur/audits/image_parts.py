"""Images as people have them (tensors, arrays, files, loaders), and a model's decisions on them.

for x, y in image_parts(np.load("images.npy", mmap_mode="r"), labels):
    ...     # tensors of at most PART_BYTES, so that only one part is in memory
"""

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demur.attacks.attack import Criterion, Rejected, RuleCriterion
from demur.attacks.attack_model import Model
from demur.data import DATASETS, OwnImages
from demur.data.sources import (
    Source,
    class_names,
    is_dataset,
    label_of_sample,
    open_source,
    pixels_of_sample,
    samples,
)
from demur.errors import BadInput, suggestion
from demur.files.checked_files import read_array, release, tensor_of
from demur.files.image_files import resize_pixels
from demur.files.output_paths import check_output_file
from demur.images import check_batch, pixels_of
from demur.output import as_output, prediction
from demur.spec.importing import allow_import, is_import_path

LabelledImages = tuple[Any, Any]  # images N, C, H, W and labels N, as arrays or tensors


def audit_images(
    data: str, n: int | None, size: int | None = None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Return the first n test images with labels, and calibration images if the data have them.

    The data are an .npz file with x and y, a folder with one folder per class, whose images are
    resized to `size`, a side in pixels, or a data set.
    """
    if n is not None and n < 1:
        raise BadInput(f"--n is {n}; give at least 1")
    if size is not None and size < 1:
        raise BadInput(f"--size is {size}; give a side in pixels, at least 1")
    if not data.strip():
        raise BadInput("--data is empty; name an .npz file, a folder or a data set")
    if is_import_path(data) and not Path(data).exists():
        allow_import(data)
        return _folder(data, n, size)
    if Path(data).is_dir():
        return _folder(data, n, size)
    if size is not None:
        raise BadInput("--size is for a folder of images; leave it out")
    return _arrays(data, n) if data.endswith(".npz") else _named(data, n)


def _arrays(data: str, n: int | None) -> tuple[LabelledImages, LabelledImages | None]:
    if not Path(data).is_file():
        raise BadInput(f"{data} is no file; name an .npz file with x and y")
    if not zipfile.is_zipfile(data):
        raise BadInput(f"{data} is no .npz file; write one with numpy.savez(file, x=x, y=y)")
    try:
        with np.load(data) as arrays:
            found = {name: _member(arrays, name) for name in arrays.files}
    except Exception as error:
        raise BadInput(f"{data} cannot be read as .npz: {error}") from None
    if not {"x", "y"} <= set(found):
        raise BadInput(
            f"{data} needs arrays x (N, C, H, W) and y (N); cal_x and cal_y are optional"
        )
    if ("cal_x" in found) != ("cal_y" in found):
        raise BadInput(f"{data} has only one of cal_x and cal_y; give both or none")
    cal = (found["cal_x"], found["cal_y"]) if "cal_x" in found else None
    if np.shape(found["x"])[:1] != np.shape(found["y"])[:1]:
        n = None  # the error names both numbers
    return (found["x"][:n], found["y"][:n]), cal


def _member(arrays: Any, name: str) -> NDArray[Any]:
    """Array of an open .npz file; a large one is mapped from a temporary file."""
    size = arrays.zip.getinfo(f"{name}.npy").file_size
    if size < PART_BYTES:
        return np.asarray(arrays[name])
    with arrays.zip.open(f"{name}.npy") as member:
        found = read_array(member, size)
    found.flags.writeable = False
    return found


def _named(name: str, n: int | None) -> tuple[LabelledImages, LabelledImages | None]:
    known = {kind.__name__.lower(): kind for kind in DATASETS if kind is not OwnImages}
    if name.lower() not in known:
        raise BadInput(
            f"--data is {name!r}, no .npz file, no folder and no data set; "
            f"{suggestion(name, known)}"
        )
    try:
        splits = known[name.lower()]().load()
    except BadInput as reason:
        where = "in an audit the folder is named by the variable DEMUR_DATA"
        raise BadInput(f"{reason} ({where})") from None
    test = splits["test"] if n is None else splits["test"].first(n)
    cal = splits["cal"].batch(slice(None)) if "cal" in splits else None
    return test.batch(slice(None)), cal


def _folder(
    data: str, n: int | None, size: int | None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Return the images of a folder, n drawn evenly over the classes; with splits test and cal."""
    source = open_source(data)
    found = {entry.label for entry in source.entries}
    classes = {name: number for number, name in enumerate(source.names or sorted(found))}
    if all(name.isdecimal() for name in found):  # numbers are those of the model
        classes = {name: int(name) for name in found}
    splits = [entry.split for entry in source.entries]
    rows = {
        at: [i for i, split in enumerate(splits) if split == at] for at in ("test", "cal", None)
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
    images, found = Spool(), set()
    for i in rows:
        try:
            pixels = source.decode(i, source.content(i))
        except BadInput as error:
            raise BadInput(f"{source.entries[i].name}: {error}") from None
        if size is not None:
            pixels = resize_pixels(pixels, size, size)
        found.add(pixels.shape[:2])
        images.append(torch.tensor(pixels).permute(2, 0, 1)[None])
    shapes = sorted(found)
    if len(shapes) > 1:
        (h, w), (other_h, other_w) = shapes[0], shapes[-1]
        raise BadInput(
            f"the images have several sizes, from {h} x {w} to {other_h} x {other_w} pixels; give "
            "--size, the side that the model takes"
        )
    joined = images.tensor()
    x: NDArray[np.uint8] = getattr(joined, "mapping", joined.numpy())
    if isinstance(x, np.memmap):
        x.flags.writeable = False  # so that its pages may be released
    return x, np.array([classes[source.entries[i].label] for i in rows])


PART_BYTES = 2**28  # of the images of a part, in fp32


def image_parts(x: Any, y: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images (N, C, H, W, floats) and labels (N, int64) in parts of about PART_BYTES.

    x is a tensor or an array (uint8 is divided by 255), or yields batches (images, labels).
    """
    if is_dataset(x) and y is None:
        x = _batches(x)
    if isinstance(x, Tensor | np.ndarray):
        if y is None:
            raise BadInput("labels are missing; give evaluate(x, y)")
        labels = _labels(y)
        if len(labels) != len(x):
            raise BadInput(
                f"there are {len(x)} images, but {len(labels)} labels; give one per image"
            )
        size = max(1, PART_BYTES // max(1, 4 * int(np.prod(x.shape[1:]))))
        for begin in range(0, max(1, len(x)), size):
            yield as_batch(x[begin : begin + size], labels[begin : begin + size])
            if isinstance(x, Tensor) or not x.flags.writeable:  # nothing is written to it
                release(x)
        return
    if y is not None and isinstance(x, Iterable) and not isinstance(x, str | bytes | dict | list):
        raise BadInput(f"{type(x).__name__} yields images and labels; leave y out")
    if y is not None or not isinstance(x, Iterable) or isinstance(x, str | bytes | dict):
        raise BadInput(
            "images must be a tensor or a NumPy array with labels, or an iterable of batches "
            f"(images, labels) such as a DataLoader, not {type(x).__name__}"
        )
    yield from _joined(x)


def _batches(dataset: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the samples of a data set as batches of one; a word is a class that it names."""
    names = class_names(dataset)

    def as_tensors(image: Any, label: Any) -> tuple[Tensor, Tensor]:
        number = label_of_sample(label)
        if isinstance(number, str) and number not in names:
            raise BadInput(f"its label is {number!r}; give the number of the class")
        floats = isinstance(image, Tensor) and image.is_floating_point()
        pixels = image if floats else torch.tensor(pixels_of_sample(image)).permute(2, 0, 1)
        x, y = as_batch(pixels[None], [names.index(number) if isinstance(number, str) else number])
        check_batch(x, y)
        return x, y

    return samples(dataset, type(dataset).__name__, as_tensors)


def _joined(batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches joined to parts of at most PART_BYTES, or single batches above it."""
    waiting, size = list[tuple[Tensor, Tensor]](), 0
    for batch in batches:
        if isinstance(batch, Mapping):
            keys = ", ".join(map(repr, batch))
            raise BadInput(
                f"a batch is a mapping with the keys {keys}; give pairs instead, such as "
                "((batch['image'], batch['label']) for batch in loader)"
            )
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise BadInput("each batch must be a pair (images, labels)")
        x, y = as_batch(batch[0], batch[1])
        if waiting and size + 4 * x.numel() > PART_BYTES:
            yield as_batch(*map(torch.cat, zip(*waiting, strict=True)))
            waiting, size = [], 0
        waiting.append((x, y))
        size += 4 * x.numel()
    if not waiting:
        raise BadInput("there are no images; give at least one batch")
    if len(shapes := sorted({tuple(x.shape[1:]) for x, _ in waiting})) > 1:
        raise BadInput(f"the images have several shapes, {shapes[0]} and {shapes[-1]}; resize them")
    yield as_batch(*map(torch.cat, zip(*waiting, strict=True)))


def as_batch(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return images and labels as tensors; uint8 images become floats, labels int64."""
    images = pixels_of(x if isinstance(x, Tensor) else _tensor(x))
    labels = _labels(y)
    if not labels.is_floating_point() and labels.dtype != torch.bool:
        labels = labels.long()
    return images, labels.to(images.device)


def _labels(y: Any) -> Tensor:
    try:
        labels = y if isinstance(y, Tensor) else torch.as_tensor(np.asarray(y))
    except (TypeError, ValueError):
        raise BadInput("labels must be integers from 0, one for each image") from None
    if labels.ndim == 0:
        raise BadInput("labels must be integers from 0, one for each image, not a single number")
    return labels


def _tensor(x: Any) -> Tensor:
    array = np.ascontiguousarray(x)
    if array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
        raise BadInput(
            f"images of shape {array.shape} look like N, H, W, C; use x.transpose(0, 3, 1, 2)"
        )
    if not array.flags.writeable:  # torch warns of tensors that share memory with a read-only file
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise BadInput(f"images must be floats in [0, 1] or uint8, not {array.dtype}") from None


class Spool:
    """Rows of a tensor; on the CPU those beyond PART_BYTES go to a temporary file."""

    def __init__(self) -> None:
        self.rows, self.bytes = list[Tensor](), 0
        self.file: IO[bytes] | None = None

    def append(self, rows: Tensor) -> None:
        """Add rows of the same shape and dtype as those before."""
        self.rows.append(rows)
        self.bytes += rows.nbytes
        if self.bytes > PART_BYTES and rows.device.type == "cpu":
            self._write()

    def _write(self) -> None:
        self.file = self.file or TemporaryFile()  # noqa: SIM115
        for rows in self.rows:
            self.file.write(rows.contiguous().numpy().data)
        self.rows, self.bytes = [self.rows[-1].new_empty(0, *self.rows[-1].shape[1:])], 0

    def tensor(self) -> Tensor:
        """All rows, mapped from the file if there is one."""
        if self.file is None:
            return torch.cat(self.rows)
        self._write()
        self.file.flush()
        none = self.rows[0].numpy()
        with self.file:
            return tensor_of(np.memmap(self.file, none.dtype, "c").reshape(-1, *none.shape[1:]))


class ArrayWriter:
    """A .npy file whose first axis grows; it appears under its name when it is complete."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.count, self.first = Path(path), 0, np.empty(0, np.float32)
        check_output_file(str(path), "npy")
        if not self.path.parent.is_dir():
            raise BadInput(f"{self.path.parent} is no folder; name another file for x_adv_path")
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.file = self.part.open("wb")

    def __enter__(self) -> Self:
        return self

    def append(self, rows: Tensor) -> None:
        """Write rows of the same shape and dtype as those before."""
        array = np.ascontiguousarray(rows.cpu().numpy())
        if self.count == 0:
            self.first = array[:0]
            self._write_header()
        self.count += len(array)
        self.file.write(array.data)

    def _write_header(self) -> None:
        header = np.lib.format.header_data_from_array_1_0(self.first)
        header["shape"] = (self.count, *self.first.shape[1:])
        # NumPy leaves room in the header for the first axis to grow.
        np.lib.format.write_array_header_1_0(self.file, header)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.file.seek(0)
            self._write_header()
        self.file.close()
        if kind is None:
            self.part.replace(self.path)
        else:
            self.part.unlink(missing_ok=True)

    def mapped(self) -> Tensor:
        """Return the finished file as a tensor that reads it from disk, copy on write."""
        return torch.from_numpy(np.load(self.path, mmap_mode="c"))


class Decisions(NamedTuple):
    """Decisions on N images, on the CPU. Without a rejector every image is accepted."""

    labels: Tensor  # predictions, N
    accepted: Tensor  # N, bool
    scores: tuple[Tensor, ...] = ()  # of the rejector, N each
    kinds: Tensor = torch.empty(0, 3)  # passes by decision, N, 3; none are counted for one pass
    passes: Tensor = torch.empty(2, 0, 0)  # what is right and what is accepted in each, 2, P, N


def decide(model: Model, criterion: Criterion, x: Tensor, bs: int) -> Decisions:
    """Return the decisions of a model, with the rejector of the criterion if it has one."""
    parts = []
    for images in x.split(bs):
        with torch.no_grad():
            out = as_output(model(images))
            labels = prediction(out)
            found = [labels, torch.ones_like(labels, dtype=torch.bool)]
            if isinstance(criterion, RuleCriterion):
                rule = criterion.accept_rule
                found = [labels, rule.accepted(out), *(score(out) for score, _ in rule.pairs)]
        parts.append([column.cpu() for column in found])
    labels, accepted, *scores = (torch.cat(column) for column in zip(*parts, strict=True))
    return Decisions(labels, accepted, tuple(scores))


def decide_by_passes(
    model: Model, criterion: Criterion, x: Tensor, y: Tensor, bs: int, passes: int
) -> Decisions:
    """Return the most frequent label and decision, mean scores and passes by decision.

    `kinds` holds for each image the number of passes in which it is accepted and right, accepted
    and wrong, and rejected: N, 3. It is empty for one pass.
    """
    parts = [decide(model, criterion, x, bs) for _ in range(passes)]
    labels, accepted = (torch.stack(list(column)) for column in list(zip(*parts, strict=True))[:2])
    both = torch.stack((right := labels == y.cpu(), accepted))
    if passes == 1:
        return parts[0]._replace(passes=both)
    kinds = torch.stack([accepted & right, accepted & ~right, ~accepted]).sum(1).t()
    means = [torch.stack(column).mean(0) for column in zip(*(p.scores for p in parts), strict=True)]
    votes = 2 * accepted.sum(0) >= passes
    return Decisions(labels.mode(0).values, votes, tuple(means), kinds, both)


def succeeded(criterion: Criterion, decisions: Decisions, y: Tensor) -> Tensor:
    """Return the images N on which an attack with this criterion has succeeded, bool."""
    if isinstance(criterion, Rejected):
        return ~decisions.accepted
    return (decisions.labels != y.cpu()) & decisions.accepted


def device_for(
    model: Model, x: Tensor, device: str | torch.device | None = None
) -> str | torch.device:
    """Return the given device, else that of the images; for images on the CPU the model's."""
    if device is not None or x.device.type != "cpu" or not isinstance(model, nn.Module):
        return device or x.device
    found = next((one.device for one in (*model.parameters(), *model.buffers())), x.device)
    if found.type == "meta":
        raise BadInput("the model has no weights (device meta); load its weights first")
    return found
