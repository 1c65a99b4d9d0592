"""Small folders of images for the tests: colours in noise, in a folder per class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("cat", "dog", "fish")


def noise_images(
    count: int, side: int, classes: int = 3, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images N, H, W, 3 whose class is the brightest channel, and their labels."""
    generator = np.random.default_rng(seed)
    y = np.arange(count) % classes
    x = generator.normal(90, 30, (count, side, side + 2, 3))
    x[np.arange(count), :, :, y % 3] += 70
    return x.clip(0, 255).astype(np.uint8), y


def write_folder(
    root: Path, count: int = 60, side: int = 10, names: Sequence[str] = CLASSES, seed: int = 0
) -> Path:
    """Write `count` PNGs as root/CLASS/NUMBER.png."""
    x, y = noise_images(count, side, len(names), seed)
    for number, (pixels, label) in enumerate(zip(x, y, strict=True)):
        path = root / names[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root
