"""CIFAR-10-C: released CIFAR-10-C/NAME.npy where present, else generated from the test images."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.data.cifar import CIFAR10, search_folders
from demur.data.corruptions import SEVERITIES, SIZE, Bytes, check_request, corrupt
from demur.errors import BadInput, bad_input

FOLDER = "CIFAR-10-C"
RELEASED, GENERATED, PROCEDURAL = "released", "generated", "generated, procedural texture"
GET_AGAIN = f"delete it and unpack {FOLDER}.tar again"


@dataclass(frozen=True)
class CorruptionSource:
    """Where images under one corruption come from: a released file, or the generator."""

    name: str
    path: Path | None = None  # of the released images

    @property
    def kind(self) -> str:
        if self.path is not None:
            return RELEASED
        return PROCEDURAL if self.name == "frost" else GENERATED

    def corrupt(self, pixels: Bytes, index: NDArray[Any], severity: int, seed: int = 0) -> Bytes:
        """Corrupted copies of images (N, 32, 32, 3); released ones are found by their index."""
        check_request(self.name, severity)
        if self.path is None:
            return corrupt(pixels, self.name, severity, index, seed)
        released = _read_released(self.path, severity)
        first = CIFAR10.published.images - len(released)  # the test images come last
        return np.array(released[index - first])


def find_source(folder: Path | None, name: str, released: bool = True) -> CorruptionSource:
    """Return the source of a corruption: a released file if there is one and `released` is true."""
    places = (place for base in search_folders(folder) for place in (base / FOLDER, base))
    paths = (place / f"{name}.npy" for place in places if released)
    return CorruptionSource(name, next((path for path in paths if path.is_file()), None))


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
