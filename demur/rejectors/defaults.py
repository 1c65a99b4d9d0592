"""The rejectors that every net is scored with, and the settings the paper tried, by data set.

READ_OFF                  # from the net's own answer
learned_from(CIFAR10())   # from features of the fit split
"""

from dataclasses import replace

from demur.data import CIFAR10, CIFAR100, Dataset
from demur.rejectors.density import KD, KNN, LID
from demur.rejectors.gaussian import GDA, GMM, GDAStar
from demur.rejectors.outputs import Con, Energy, Entropy, MaxLogit, ProbabilityMargin
from demur.rejectors.vim import ViM
from demur.rule import Rejector

OUTPUT_REJECTORS: dict[str, Rejector] = {
    "Energy": Energy(), "Margin": ProbabilityMargin(), "Entropy": Entropy(), "MaxLogit": MaxLogit(),
}  # fmt: skip
_GAUSSIAN: dict[str, Rejector] = {"GDA": GDA(), "GDA*": GDAStar(), "GMM": GMM(), "ViM": ViM()}
_NEAR: dict[type[Dataset], dict[str, Rejector]] = {
    CIFAR10: {"KD": KD(), "LID": LID(), "kNN": KNN()},
    # paper: sigma is 1 here; reference code: 1e-2
    CIFAR100: {
        "KD": KD(1.0, 100), "KD, sigma 0.01": KD(1e-2, 100), "LID": LID(20), "kNN": KNN(),
    },
}  # fmt: skip
_FEW_IMAGES: dict[str, Rejector] = {"KD": KD(1e-2, 100), "LID": LID(20), "kNN": KNN(10)}
_TRIED: dict[type[Dataset], tuple[KD, tuple[float, ...], tuple[int, ...]]] = {
    CIFAR10: (KD(), (1e-1, 1e-2, 1e-3), (*range(100, 900, 100), 1000, 2000)),
    CIFAR100: (
        KD(per_class=100), (10.0, 1.0, 1e-1, 1e-2, 1e-3),
        (10, 20, 40, 60, 80, *range(100, 600, 100)),
    ),
}  # fmt: skip
_TRIED_ON_FEW = (KD(per_class=100), (1.0, 1e-1, 1e-2, 1e-3), (10, 20, 40, 60, 80, 100))


def fitted_rejectors(data: Dataset) -> dict[str, Rejector]:
    """Rejectors that learn from features, at the settings for this data set."""
    return {**_NEAR.get(type(data), _FEW_IMAGES), **_GAUSSIAN}


def paper_grid(data: Dataset) -> dict[str, Rejector]:
    """The settings of KD and LID that the paper tried, beside confidence."""
    density, sigmas, counts = _TRIED.get(type(data), _TRIED_ON_FEW)
    widths = {f"KD, sigma {sigma:g}": replace(density, sigma=sigma) for sigma in sigmas}
    return {"Con": Con(), **widths, **{f"LID, k {k}": LID(k) for k in counts}}
