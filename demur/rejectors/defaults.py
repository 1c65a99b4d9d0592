"""Rejectors that every net is scored with, and the settings that the paper tried.

OUTPUT_REJECTORS                # read off the net's output
fitted_rejectors(CIFAR10())     # fitted to features of the fit split, with the data set's settings
"""

from dataclasses import replace

from demur.data import CIFAR10, CIFAR100, Dataset
from demur.rejectors.density import KD, KNN, LID
from demur.rejectors.gaussian import GDA, GMM, GDAStar
from demur.rejectors.outputs import Con, Energy, Entropy, MaxLogit, SoftmaxMargin
from demur.rejectors.vim import ViM
from demur.rule import Rejector

OUTPUT_REJECTORS: dict[str, Rejector] = {
    "Energy": Energy(), "Margin": SoftmaxMargin(), "Entropy": Entropy(), "MaxLogit": MaxLogit(),
}  # fmt: skip
_GAUSSIAN: dict[str, Rejector] = {"GDA": GDA(), "GDA*": GDAStar(), "GMM": GMM(), "ViM": ViM()}
_DENSITY: dict[type[Dataset], dict[str, Rejector]] = {
    CIFAR10: {"KD": KD(), "LID": LID(), "kNN": KNN()},
    # paper: sigma is 1 here; reference code: 1e-2
    CIFAR100: {
        "KD": KD(1.0, 100), "KD, sigma 0.01": KD(1e-2, 100), "LID": LID(20), "kNN": KNN(),
    },
}  # fmt: skip
_DENSITY_FEW_IMAGES: dict[str, Rejector] = {"KD": KD(1e-2, 100), "LID": LID(20), "kNN": KNN(10)}
# KD with the data set's bank size, the values of sigma, and the values of LID's k
_GRID: dict[type[Dataset], tuple[KD, tuple[float, ...], tuple[int, ...]]] = {
    CIFAR10: (KD(), (1e-1, 1e-2, 1e-3), (*range(100, 900, 100), 1000, 2000)),
    CIFAR100: (
        KD(per_class=100), (10.0, 1.0, 1e-1, 1e-2, 1e-3),
        (10, 20, 40, 60, 80, *range(100, 600, 100)),
    ),
}  # fmt: skip
_GRID_FEW_IMAGES = (KD(per_class=100), (1.0, 1e-1, 1e-2, 1e-3), (10, 20, 40, 60, 80, 100))


def fitted_rejectors(data: Dataset) -> dict[str, Rejector]:
    """Rejectors fitted to features, by name, with the settings for this data set."""
    return {**_DENSITY.get(type(data), _DENSITY_FEW_IMAGES), **_GAUSSIAN}


def paper_grid(data: Dataset) -> dict[str, Rejector]:
    """Con, and KD and LID at every setting that the paper tried on this data set, by name."""
    density, sigmas, ks = _GRID.get(type(data), _GRID_FEW_IMAGES)
    by_sigma = {f"KD, sigma {sigma:g}": replace(density, sigma=sigma) for sigma in sigmas}
    return {"Con": Con(), **by_sigma, **{f"LID, k {k}": LID(k) for k in ks}}
