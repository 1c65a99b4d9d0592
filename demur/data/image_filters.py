"""Blurs, warps and textures of CIFAR-10-C on batches of images (N, H, W, C), in NumPy and SciPy.

    motion_blur(x, radius=6, sigma=1.0, angle=np.zeros(len(x)))
    centre_zoom(x, 1.25)

No function uses BLAS for pixels, so that a value just below a whole number is the same everywhere.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import correlate, gaussian_filter, rotate

Array = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

_FIRST_AMPLITUDE = 100.0**2  # of the plasma fractal
_TEXTURES, _TEXTURE_SIZE, _TEXTURE_SEED = 5, 192, 20_220_619
_ICE_DARK, _ICE_BRIGHT = (38.0, 56.0, 84.0), (236.0, 244.0, 252.0)


def smooth(x: Array, sigma: float) -> Array:
    """Gaussian blur of each channel, cut at 4 sigma, with edge pixels repeated outside."""
    blurred: Array = gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4.0)
    return blurred


def disk_blur(x: Array, radius: float, sigma: float) -> Array:
    """Blur by a disk whose edge is softened by a 3 x 3 Gaussian, with images mirrored outside."""
    reach = int(radius) + 1
    offsets = np.arange(-reach, reach + 1)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(np.float64)
    edge = np.exp(-np.array([1.0, 0.0, 1.0]) / (2 * sigma**2))
    kernel = correlate(disk / disk.sum(), np.outer(edge, edge) / edge.sum() ** 2, mode="constant")
    blurred: Array = correlate(x, kernel[None, :, :, None], mode="mirror")
    return blurred


def motion_blur(x: Array, radius: int, sigma: float, angle: NDArray[np.float64]) -> Array:
    """Average along a half line with Gaussian weights, as ImageMagick's motion blur does.

    The line starts at the pixel, has 2 radius + 1 pixels and its own angle (degrees) per image.
    Pixels outside the image repeat its edge.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2)).astype(np.float32)
    weights /= weights.sum()
    radians = np.radians(angle)
    height, width = x.shape[1:3]
    image = np.arange(len(x))[:, None, None]
    blurred = np.zeros_like(x)
    for step, weight in zip(steps, weights, strict=True):
        down, right = (np.ceil(step * f(radians) - 0.5).astype(int) for f in (np.sin, np.cos))
        rows = np.clip(np.arange(height) + down[:, None], 0, height - 1)
        columns = np.clip(np.arange(width) + right[:, None], 0, width - 1)
        blurred += weight * x[image, rows[:, :, None], columns[:, None, :]]
    return blurred


def centre_zoom(x: Array, factor: float) -> Array:
    """Enlarge the centre by `factor` with linear interpolation, and crop to the old size."""
    size = x.shape[1]
    part = int(np.ceil(size / factor))
    enlarged = round(part * factor)
    crop = (enlarged - size) // 2
    # the corners of the part fall on the corners of the enlarged image
    position = (np.arange(size) + crop) * (part - 1) / (enlarged - 1)
    first = np.minimum(position.astype(int), part - 2)
    share = (position - first).astype(np.float32)
    first += (size - part) // 2
    rows, columns = share[:, None, None], share[:, None]
    x = x[:, first] * (1 - rows) + x[:, first + 1] * rows
    result: Array = x[:, :, first] * (1 - columns) + x[:, :, first + 1] * columns
    return result


def sample(x: Array, rows: Array, columns: Array, repeat_edge: bool) -> Array:
    """Bilinear values of images at positions (N, H, W), with images mirrored outside.

    Args:
        x: Images (N, H, W, C).
        rows: Position from the top, in pixels.
        columns: Position from the left.
        repeat_edge: Whether the mirror repeats the edge pixel (b a | a b) or not (c b | a b).
    """
    image = np.arange(len(x))[:, None, None]
    top, left = np.floor(rows), np.floor(columns)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    above, below = (_mirror(top + i, x.shape[1], repeat_edge) for i in (0, 1))
    before, after = (_mirror(left + i, x.shape[2], repeat_edge) for i in (0, 1))
    upper = x[image, above, before] * (1 - right) + x[image, above, after] * right
    lower = x[image, below, before] * (1 - right) + x[image, below, after] * right
    return upper * (1 - down) + lower * down


def _mirror(position: NDArray[Any], size: int, repeat_edge: bool) -> NDArray[np.int64]:
    last = 2 * size - 1 if repeat_edge else 2 * size - 2
    folded = position.astype(np.int64) % (last + repeat_edge)
    return np.minimum(folded, last - folded)


def plasma(noise: Array, decay: float) -> Array:
    """Periodic fractal heights in [0, 1] by the diamond-square algorithm, one map per image.

    Args:
        noise: One value in [-1, 1] per point (N, S, S), S a power of two.
        decay: The amplitude falls by `decay` squared from one level of detail to the next.
    """
    heights = np.zeros_like(noise, dtype=np.float64)
    step, amplitude = noise.shape[1], _FIRST_AMPLITUDE
    while step >= 2:
        even, odd = slice(0, None, step), slice(step // 2, None, step)
        corners = heights[:, even, even]
        pairs = corners + np.roll(corners, -1, 1)
        heights[:, odd, odd] = (pairs + np.roll(pairs, -1, 2)) / 4 + amplitude * noise[:, odd, odd]
        centres = heights[:, odd, odd]
        for axis, rows, columns in ((1, even, odd), (2, odd, even)):
            around = centres + np.roll(centres, 1, axis) + corners + np.roll(corners, -1, 3 - axis)
            heights[:, rows, columns] = around / 4 + amplitude * noise[:, rows, columns]
        step, amplitude = step // 2, amplitude / decay**2
    heights -= heights.min((1, 2), keepdims=True)
    heights /= heights.max((1, 2), keepdims=True)
    return heights.astype(np.float32)


@lru_cache(maxsize=1)
def procedural_frost() -> tuple[Bytes, ...]:
    """Five textures (H, W, 3) that stand for the photographs of frost in the published script."""
    return tuple(_frost_texture(number) for number in range(_TEXTURES))


def _frost_texture(number: int) -> Bytes:
    """Needles of ice along two directions over a bluish pane, from ridges of smooth noise."""
    generator = np.random.default_rng([_TEXTURE_SEED, number])
    size = 2 * _TEXTURE_SIZE
    ice = np.zeros((_TEXTURE_SIZE, _TEXTURE_SIZE))
    for width, length, weight, turn in ((2.5, 14, 0.45, 0), (1.2, 7, 0.35, 60), (0.8, 4, 0.3, -60)):
        noise = gaussian_filter(generator.standard_normal((size, size)), (width, length))
        angle = 36.0 * number + turn
        turned = rotate(noise / noise.std(), angle, reshape=False, order=1)
        inner = slice(size // 4, size // 4 + _TEXTURE_SIZE)
        ice += weight * np.exp(-2.0 * np.abs(turned[inner, inner]))
    cover = gaussian_filter(generator.standard_normal(ice.shape), 12)
    ice = np.clip(ice * (1.25 + 0.35 * cover / cover.std()), 0, 1)
    dark, bright = np.array(_ICE_DARK), np.array(_ICE_BRIGHT)
    texture: Bytes = (dark + ice[:, :, None] * (bright - dark)).astype(np.uint8)
    return texture
