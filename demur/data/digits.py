"""The embedded data: 1,797 real handwritten digits of 8x8 pixels that scikit-learn carries.

No download. The order is one fixed shuffle; the first 1,150 images are fit, then 150 val, 197
cal and 300 test. Every record keeps the places of its images in the published order.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from demur.data.dataset import Dataset, ThreatModel
from demur.data.images import SPLITS, Images, Splits
from demur.images import Domain
from demur.noise import permutation

SIZES = (1150, 150, 197, 300)
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Digits(Dataset):
    """Handwritten digits, ten classes, 17 grey levels."""

    domain = Domain(classes=10, shape=(1, 8, 8), mean=(0.305,), std=(0.376,))
    threat = ThreatModel(linf=0.15, linf_step=0.0375, l2=0.8, l2_step=0.1)

    def load(self, folder: Path | None = None) -> Splits:
        """The four splits, from scikit-learn's own file."""
        table = _table()
        pixels = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
        y = torch.from_numpy(table[:, -1].astype(np.int64))
        places = permutation(SHUFFLE_SEED, len(y), stream=0).split(SIZES)
        return {
            name: Images(pixels[place], y[place], place, levels=16)
            for name, place in zip(SPLITS, places, strict=True)
        }


def _table() -> NDArray[np.float64]:
    """Every image as 64 pixels and a label, from the file: to import the library takes a second."""
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # where the file has another place

    bundle = load_digits()
    return np.column_stack([bundle.data, bundle.target])
