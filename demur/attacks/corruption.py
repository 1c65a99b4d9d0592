"""Corruptions of CIFAR-10-C in the form of an attack, so that they have records like any other.

They are made for 32 x 32 colour images. Smaller images, such as the digits, are enlarged by a whole
factor before and averaged after.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from demur.attacks.attack import Attack, AttackBatch
from demur.data.corruptions import SEVERITIES, SIZE, Bytes, CorruptionSource
from demur.errors import BadInput
from demur.noise import Stream
from demur.spec.field_types import Condition

CorruptionName = Literal[
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur",
    "zoom_blur", "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate",
    "jpeg_compression",
]  # fmt: skip
Severity = Annotated[int, Condition(lambda v: v in SEVERITIES, "from 1 to 5")]
LEVELS = 255


@dataclass(frozen=True)
class Corruption(Attack):
    """A corruption of CIFAR-10-C (Hendrycks and Dietterich 2019); the model is not queried.

    Args:
        name: One of the 15 corruptions.
        severity: 1 to 5. None gives image i the severity 1 + i mod 5, so that one record
            holds all severities in equal shares.
    """

    name: CorruptionName = "gaussian_noise"
    severity: Severity | None = None

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        return self.corrupt(batch.x, batch.index, CorruptionSource(self.name))

    def corrupt(self, x: Tensor, index: Tensor, source: CorruptionSource) -> Tensor:
        """Return corrupted copies of images (N, C, H, W) in [0, 1] from a source."""
        pixels, positions = enlarge(x), index.cpu().numpy()
        severities = image_severities(self, positions)
        made = np.empty_like(pixels)
        for severity in np.unique(severities):
            rows = severities == severity
            made[rows] = source.corrupt(pixels[rows], positions[rows], int(severity))
        return shrink(made, x)

    @property
    def seeks_misclassification(self) -> bool:
        return False


def image_severities(attack: Corruption, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Severity of each image by its index, N."""
    if attack.severity is None:
        return 1 + index % len(SEVERITIES)
    return np.full(len(index), attack.severity)


def enlarge(x: Tensor) -> Bytes:
    """Bytes (N, 32, 32, 3) of images; each pixel of a smaller one becomes a square."""
    _, channels, height, width = x.shape
    if channels not in (1, 3) or max(height, width) > SIZE:
        raise BadInput(
            f"corruptions need images of 1 or 3 channels and at most {SIZE} x {SIZE} pixels, not "
            f"{channels} x {height} x {width}; resize them, or use another attack"
        )
    factor = SIZE // max(height, width)
    large = x.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    missing = SIZE - width * factor, SIZE - height * factor
    large = pad(large, (0, missing[0], 0, missing[1]), mode="replicate").expand(-1, 3, -1, -1)
    bytes_ = (large * LEVELS).round().to(torch.uint8)
    return bytes_.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def shrink(pixels: Bytes, like: Tensor) -> Tensor:
    """Images of bytes (N, 32, 32, 3) in the shape, dtype and place of `like`."""
    height, width = like.shape[2:]
    factor = SIZE // max(height, width)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(like) / LEVELS
    images = avg_pool2d(images[:, :, : height * factor, : width * factor], factor)
    return images.mean(1, keepdim=True) if like.shape[1] == 1 else images
