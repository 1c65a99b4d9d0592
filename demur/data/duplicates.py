"""Images of a user's that occur twice at the input of the net, exactly or nearly.

    notes, leaks = exact_duplicates(entries, digests, readable, keep=False)
    pairs = similar_pairs(pixels)       # N, C, S, S: positions of images that look alike

Two images look alike if their perceptual hashes (dHash: is a pixel brighter than its left and than
its upper neighbour, in a grey image of 9 x 9 pixels) differ in at most 1/12 of the bits, and the
two grey images correlate by at least 0.98. Copies in other colours look alike too. On the 10,000
test images of CIFAR-10 that are 8 pairs; of 500 copies saved as JPEG of quality 75 it finds 93%.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from demur.data.dataset import SPLITS, SplitName
from demur.data.sources import Entry

SIDE = 9  # of the grey image that is hashed
BITS = 1 / 12  # share of the bits in which similar images may differ: 12 of 144
CORRELATION = 0.98
BLOCK = 1024  # images hashed or compared at a time
Pairs = list[tuple[int, int]]


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


def similar_pairs(pixels: NDArray[np.uint8]) -> Pairs:
    """Pairs of positions of images (N, C, S, S) that look alike, the smaller position first."""
    parts = [_hashes(pixels[i : i + BLOCK]) for i in range(0, len(pixels), BLOCK)]
    bits, grey = (np.concatenate(part) for part in zip(*parts, strict=True))
    found: Pairs = []
    for start in range(0, len(bits), BLOCK):
        # bits are +1 and -1, so a product falls by two with every bit that differs
        same = bits[start : start + BLOCK] @ bits[start:].T
        first, second = np.nonzero(same >= bits.shape[1] * (1 - 2 * BITS))
        first, second = first[first < second] + start, second[first < second] + start
        alike = (grey[first] * grey[second]).sum(1) >= CORRELATION
        found += zip(first[alike].tolist(), second[alike].tolist(), strict=True)
    return found


def _hashes(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Bits as +1 and -1 (N, B), and the small grey images with mean 0 and norm 1 (N, P).

    An image of one colour has norm 0, so that it looks like no other.
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
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1.0)
    return np.where(np.concatenate(steps, axis=1), np.float32(1), np.float32(-1)), flat
