"""The data set that needs no download: scikit-learn's 1,797 handwritten digits of 8x8 pixels.

A fixed permutation orders the images: 1,150 fit, 150 val, 197 cal, 300 test. The index of an
image is its position in scikit-learn's order.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from demur.data.dataset import SPLITS, Dataset, Images, Splits, ThreatModel
from demur.images import Domain
from demur.noise import permutation

SIZES = (1150, 150, 197, 300)
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Digits(Dataset):
    """Handwritten digits: 1,797 images of 1x8x8 pixels with 17 grey levels in 10 classes.

    The images come with scikit-learn, so `load` needs no folder. There are no fields.

    Example:
        >>> splits = Digits().load()
        >>> {name: len(images) for name, images in splits.items()}
        {'fit': 1150, 'val': 150, 'cal': 197, 'test': 300}
        >>> x, y = splits["test"].batch(slice(0, 4))
        >>> x.shape
        torch.Size([4, 1, 8, 8])
    """

    domain = Domain(classes=10, shape=(1, 8, 8), mean=(0.305,), std=(0.376,))
    threat = ThreatModel(linf=0.15, linf_step=0.0375, l2=0.8, l2_step=0.1)

    def load(self, folder: Path | None = None) -> Splits:
        table = _table()
        pixels = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
        y = torch.from_numpy(table[:, -1].astype(np.int64))
        indices = permutation(SHUFFLE_SEED, len(y), stream=0).split(SIZES)
        return {
            name: Images(pixels[index], y[index], index, levels=16)
            for name, index in zip(SPLITS, indices, strict=True)
        }


def _table() -> NDArray[np.float64]:
    """One row per image: 64 pixels and a label."""
    # read the file directly: importing scikit-learn takes a second
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # the file moved

    bundle = load_digits()
    return np.column_stack([bundle.data, bundle.target])
