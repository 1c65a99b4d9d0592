"""CIFAR-10-C: the released files where they are present, else generated from the test images.

Released are CIFAR-10-C/NAME.npy with the images of severities 1 to 5 in turn. The five photographs
frost1.png ... frost5.jpg of the authors' script are used if they lie beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.data.cifar import CIFAR10, search_folders
from demur.data.corruptions import SEVERITIES, SIZE, Bytes, check_request, corrupt
from demur.errors import BadInput, bad_input
from demur.files.image_files import import_pillow

FOLDER = "CIFAR-10-C"
RELEASED, GENERATED, PROCEDURAL = "released", "generated", "generated, procedural texture"
FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
FROST_REDUCTION = 5  # the authors shrink the photographs to a fifth
GET_AGAIN = f"delete it and unpack {FOLDER}.tar again"


@dataclass(frozen=True)
class CorruptionSource:
    """Where images under one corruption come from: a released file, or the generator."""

    name: str
    path: Path | None = None  # of the released images
    frost: Sequence[Bytes] | None = None  # textures of frost; None for procedural ones

    @property
    def kind(self) -> str:
        if self.path is not None:
            return RELEASED
        return PROCEDURAL if self.name == "frost" and self.frost is None else GENERATED

    def corrupt(self, pixels: Bytes, index: NDArray[Any], severity: int, seed: int = 0) -> Bytes:
        """Corrupted copies of images (N, 32, 32, 3); released ones are found by their index."""
        check_request(self.name, severity)
        if self.path is None:
            return corrupt(pixels, self.name, severity, index, seed, self.frost)
        released = _read_released(self.path, severity)
        first = CIFAR10.published.images - len(released)  # the test images come last
        return np.array(released[index - first])


def find_source(folder: Path | None, name: str, released: bool = True) -> CorruptionSource:
    """Return the source of a corruption: a released file if there is one and `released` is true."""
    path = _find(folder, f"{name}.npy") if released else None
    frost = _frost_textures(folder) if name == "frost" and path is None else None
    return CorruptionSource(name, path, frost)


def _find(folder: Path | None, name: str) -> Path | None:
    """The first file of this name in the search folders or their CIFAR-10-C."""
    places = (place for base in search_folders(folder) for place in (base / FOLDER, base))
    return next((place / name for place in places if (place / name).is_file()), None)


def _read_released(path: Path, severity: int) -> Bytes:
    count = CIFAR10.published.layouts[0].parts[-1].images
    shape = (count * len(SEVERITIES), SIZE, SIZE, 3)
    # a damaged header raises TokenError, SyntaxError, BadZipFile and others
    with bad_input(f"{path} is not a complete NumPy array; {GET_AGAIN}"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != np.uint8:
        raise BadInput(
            f"{path} must contain uint8 values of shape {' x '.join(map(str, shape))}; {GET_AGAIN}"
        )
    return array[(severity - 1) * count : severity * count]


def _frost_textures(folder: Path | None) -> list[Bytes] | None:
    """The authors' photographs, shrunk; None unless all are present."""
    paths = [path for name in FROST_FILES if (path := _find(folder, name))]
    return [_read_texture(path) for path in paths] if len(paths) == len(FROST_FILES) else None


def _read_texture(path: Path) -> Bytes:
    pillow = import_pillow()
    with bad_input(f"{path} is not a complete PNG or JPEG image; get it again"):
        pixels = np.asarray(pillow.open(path, formats=["PNG", "JPEG"]).convert("RGB"))
    # bilinear interpolation to a fifth reads the middle one of five pixels
    middle = slice(FROST_REDUCTION // 2, None, FROST_REDUCTION)
    texture = pixels[middle, middle]
    if min(texture.shape[:2]) <= SIZE:
        least = (SIZE + 1) * FROST_REDUCTION
        raise BadInput(f"{path} must be at least {least} pixels wide and high; get it again")
    return texture
