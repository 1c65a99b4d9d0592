"""Splits of a user's own images: stratified by class, without duplicates, chosen by content.

The pixels of an image decide its split, not its name or its place in a listing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from demur.data.dataset import SPLITS, SplitName
from demur.data.sources import Entry
from demur.errors import BadInput, shorten

SHARES: dict[SplitName, float] = {"val": 0.1, "cal": 0.15, "test": 0.15}  # the rest is fit
FEWEST = 5  # images of a class that demur divides: two to fit and one to each other split
IMBALANCE = 3.0  # ratio of class sizes above which the report says so
IN_TWO_SPLITS = "the same images in two splits"
LOOK_ALIKE = "images that look alike in different splits or classes"
MOST_NAMED = 5  # files that a sentence names

SIDE = 9  # of the grey images that are hashed
BITS = 1 / 12  # share of the bits of a hash in which similar images may differ: 12 of 144
CORRELATION = 0.98  # of similar grey images, at least
BLOCK = 1024  # images hashed or compared at a time
CANDIDATES, MOST_PAIRS = 100_000, 10_000  # compared of each block; reported
Pairs = list[tuple[int, int]]


class SplitResult(NamedTuple):
    """The images of each split, and why the others are in none."""

    chosen: dict[SplitName, list[int]]
    notes: dict[int, str]  # entry: why it is left out
    classes: tuple[str, ...]
    leaks: Pairs  # images in two given splits
    similar: Pairs = []  # images that look alike, in different splits or classes

    @property
    def ordered(self) -> list[tuple[SplitName, int]]:
        """Every image with its split, one split after the other."""
        return [(name, i) for name in SPLITS for i in self.chosen[name]]


def assign_splits(
    entries: Sequence[Entry], digests: Sequence[str], inputs: Sequence[str],
    faults: Mapping[int, str], keep: bool = False,
) -> SplitResult:  # fmt: skip
    """Divide the readable entries into splits; `keep` keeps images that are in several.

    `digests` are those of the pixels, `inputs` those after resizing, which decide what is a
    duplicate. BadInput is raised for fewer than two classes, or a class with too few images.
    """
    readable = [i for i in range(len(entries)) if i not in faults]
    duplicates, leaks = exact_duplicates(entries, inputs, readable, keep)
    notes = {**faults, **duplicates}
    kept = sorted((i for i in readable if i not in notes), key=lambda i: digests[i])
    classes = tuple(sorted({entries[i].label for i in kept}))
    for label in classes:
        if not label.isprintable():  # half a surrogate pair is not printable either
            raise BadInput(f"the name of the class {label!r} cannot be printed; rename it")
    if len(classes) < 2:
        raise BadInput(_too_few_classes(classes, notes))
    chosen: dict[SplitName, list[int]] = {name: [] for name in SPLITS}
    given = {entries[i].split for i in kept} - {None}
    for label in classes:
        of_class = [i for i in kept if entries[i].label == label]
        for name in SPLITS[1:]:
            chosen[name] += [i for i in of_class if entries[i].split == name]
        to_divide = [i for i in of_class if entries[i].split in (None, "fit")]
        for name, part in _divide(to_divide, label, [s for s in SPLITS if s not in given]).items():
            chosen[name] += part
    ordered = {name: sorted(part, key=lambda i: digests[i]) for name, part in chosen.items()}
    return SplitResult(ordered, notes, classes, leaks)


def _divide(
    images: list[int], label: str, missing: Sequence[SplitName]
) -> dict[SplitName, list[int]]:
    """Images of one class for the splits that have none yet; the rest is for training."""
    wanted = [name for name in missing if name != "fit"]
    fewest = FEWEST - len(SHARES) + len(wanted)
    if len(images) < fewest:
        raise BadInput(
            f"the class {shorten(label)!r} has {len(images)} images for training and needs at "
            f"least {fewest}; add images or leave the class out"
        )
    parts, left = dict[SplitName, list[int]](), images
    for name in wanted:
        count = max(1, round(SHARES[name] * len(images)))
        parts[name], left = left[:count], left[count:]
    return {**parts, "fit": left}


def _too_few_classes(classes: tuple[str, ...], notes: dict[int, str]) -> str:
    found = "there is no class with a usable image"
    if classes:
        found = f"all images are in the class {classes[0]!r}"
    first = next(iter(notes.values()), "")
    left_out = f"; {len(notes)} files are left out, the first since {first}" if notes else ""
    return (
        f"{found}; a classifier needs at least two, each a folder of its own in the folder that "
        f"you name{left_out}"
    )


def exact_duplicates(
    entries: Sequence[Entry], digests: Sequence[str], readable: Sequence[int], keep: bool
) -> tuple[dict[int, str], Pairs]:
    """Entries to leave out since their pixels occur again, with reasons, and pairs across splits.

    Of several splits the last keeps the image, so that no test image is trained on; `keep` leaves
    one in each. An image in several classes is left out of all.
    """
    groups: dict[str, list[int]] = {}
    for i in readable:
        groups.setdefault(digests[i], []).append(i)
    notes: dict[int, str] = {}
    leaks: Pairs = []
    for group in groups.values():
        first: dict[SplitName, int] = {}
        for i in group:
            first.setdefault(entries[i].split or "fit", i)
        in_order = sorted(first, key=SPLITS.index)
        last = first[in_order[-1]]
        leaks += [(first[in_order[0]], last)] if len(first) > 1 else []
        labels = sorted({entries[i].label for i in group})
        if len(labels) > 1:
            notes |= {i: f"the same image is in the classes {', '.join(labels)}" for i in group}
            continue
        for i in sorted(set(group) - (set(first.values()) if keep else {last})):
            elsewhere = (entries[i].split or "fit") != in_order[-1]
            notes[i] = f"duplicate of {entries[last].name}"
            notes[i] += f" in {in_order[-1]}" if elsewhere else ""
    return notes, leaks


def similar_pairs(pixels: NDArray[np.uint8], groups: NDArray[np.int64]) -> Pairs:
    """Positions of images (N, C, S, S) of different groups (N) that look alike, MOST_PAIRS at most.

    Their perceptual hashes (dHash: is a pixel brighter than its left and its upper neighbour, in a
    grey image of 9 x 9 pixels) differ in at most 1/12 of the bits, and these images correlate.
    """
    parts = [_hashes(pixels[i : i + BLOCK]) for i in range(0, len(pixels), BLOCK)]
    bits, grey = (np.concatenate(part) for part in zip(*parts, strict=True))
    found: Pairs = []
    for start in range(0, len(bits), BLOCK):
        # bits are +1 and -1, so a product falls by two with every bit that differs
        same = bits[start : start + BLOCK] @ bits[start:].T
        alike = same >= bits.shape[1] - 2 * int(BITS * bits.shape[1])
        first, second = np.nonzero(np.triu(alike, 1))
        apart = groups[start + first] != groups[start + second]
        first, second = first[apart][:CANDIDATES] + start, second[apart][:CANDIDATES] + start
        close = (grey[first] * grey[second]).sum(1) >= CORRELATION
        found += zip(first[close].tolist(), second[close].tolist(), strict=True)
    return found[:MOST_PAIRS]


def _hashes(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Bits as +1 and -1 (N, B), and the small grey images with mean 0 and norm 1 (N, P).

    Both are 0 for an image of one colour, so that it looks like no other.
    """
    count, _, size, _ = pixels.shape
    side = min(SIDE, size)
    edges = np.arange(side) * size // side
    widths = np.diff([*edges, size]).astype(np.float32)
    grey = pixels.sum(1, dtype=np.float32)
    small = np.add.reduceat(np.add.reduceat(grey, edges, 1), edges, 2)
    small /= np.multiply.outer(widths, widths)
    steps = [np.diff(small, axis=axis).reshape(count, -1) > 0 for axis in (1, 2)]
    flat = small.reshape(count, -1) - small.mean((1, 2))[:, None]
    norm = np.linalg.norm(flat, axis=1, keepdims=True)
    sign = np.where(np.concatenate(steps, axis=1), np.float32(1), np.float32(-1))
    return sign * (norm > 1), flat / np.maximum(norm, 1)


def pair_sentence(what: str, entries: Sequence[Entry], pairs: Pairs) -> str:
    """What some pairs of images are, and the first of them; empty for none."""
    named = [f"{entries[i].name} and {entries[j].name}" for i, j in pairs]
    return _listed(what, named) if pairs else ""


def report(
    entries: Sequence[Entry], result: SplitResult, faults: Mapping[int, str], ignored: int
) -> list[str]:
    """Sentences about the splits, unreadable files, duplicates and imbalance."""
    used = [i for part in result.chosen.values() for i in part]
    sizes = Counter(entries[i].label for i in used)
    splits = ", ".join(f"{name} {len(part)}" for name, part in result.chosen.items())
    listed = ", ".join(f"{name} {sizes[name]}" for name in result.classes[:MOST_NAMED])
    more = f" and {len(sizes) - MOST_NAMED} more" if len(sizes) > MOST_NAMED else ""
    sentences = [f"{len(used)} images in {len(sizes)} classes ({listed}{more}): {splits}"]
    if faults:
        sentences.append(_named("cannot be read", entries, faults))
    if removed := {i: note for i, note in result.notes.items() if i not in faults}:
        sentences.append(_named("left out", entries, removed))
    kept = [pair for pair in result.leaks if not removed.keys() & set(pair)]
    for what, pairs in ((IN_TWO_SPLITS, kept), (LOOK_ALIKE, result.similar)):
        sentences += [pair_sentence(what, entries, pairs)] if pairs else []
    if ignored:
        sentences.append(f"{ignored} without the suffix of an image ignored")
    largest, smallest = (pick(result.classes, key=sizes.__getitem__) for pick in (max, min))
    if (ratio := sizes[largest] / sizes[smallest]) >= IMBALANCE:
        sentences.append(
            f"the classes are unbalanced: {largest} has {ratio:.1f} times the images of "
            f"{smallest}, so accuracy says little about {smallest}"
        )
    for name, part in result.chosen.items():
        if lacking := sorted(set(result.classes) - {entries[i].label for i in part}):
            sentences.append(f"the {name} split has no image of {', '.join(lacking[:MOST_NAMED])}")
    return sentences


def _named(what: str, entries: Sequence[Entry], reasons: Mapping[int, str]) -> str:
    """One sentence that names the first of some images, with the reason of each."""
    named = [f"{entries[i].name} ({reason})" for i, reason in reasons.items()]
    return f"{_listed(f'{len(reasons)} {what}', named)}; data.csv of the run lists all"


def _listed(what: str, named: Sequence[str]) -> str:
    least = "at least " if len(named) == MOST_PAIRS else ""
    more = f" and {least}{len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"{what}: {', '.join(named[:MOST_NAMED])}{more}"
