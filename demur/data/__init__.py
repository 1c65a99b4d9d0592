"""Data sets, their splits, and augmentation."""

from demur.data.augment import IDBH, Augment, CropFlip, NoAugment
from demur.data.cifar import CIFAR10, CIFAR100
from demur.data.dataset import SPLITS, Dataset, Digits, Images, SplitName, Splits, ThreatModel
from demur.data.own_images import BatchStream, MappedImages, OwnImages

DATASETS: tuple[type[Dataset], ...] = (Digits, CIFAR10, CIFAR100, OwnImages)
AUGMENTS: tuple[type[Augment], ...] = (NoAugment, CropFlip, IDBH)

__all__ = [
    "AUGMENTS", "CIFAR10", "CIFAR100", "DATASETS", "IDBH", "SPLITS", "Augment", "BatchStream",
    "CropFlip", "Dataset", "Digits", "Images", "MappedImages", "NoAugment", "OwnImages",
    "SplitName", "Splits", "ThreatModel",
]  # fmt: skip
