"""The 15 corruptions of CIFAR-10-C at 5 severities: released files, or made from 32 x 32 images.

The constants are those of the authors' script for CIFAR-10-C; ImageNet-C has others. The script has
no seed, so generated images differ from the released ones. Frost differs most: the authors crop
photographs of frost, which demur replaces by procedural textures.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from demur.data.cifar import CIFAR10, search_folders
from demur.errors import BadInput, bad_input, import_optional, suggestion
from demur.files.image_files import import_pillow

# Blurs, warps and textures use no BLAS, so that a value just below a whole number is the same
# everywhere.
Array = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

_FIRST_AMPLITUDE = 100.0**2  # of the plasma fractal
_TEXTURES, _TEXTURE_SIZE, _TEXTURE_SEED = 5, 192, 20_220_619
_ICE_DARK, _ICE_BRIGHT = (38.0, 56.0, 84.0), (236.0, 244.0, 252.0)
SIZE = 32
SEVERITIES = (1, 2, 3, 4, 5)
CHUNK = 200  # images in one pass, for the CPU's cache

Generators = Sequence[np.random.Generator]
_nd = partial(import_optional, "scipy.ndimage", "corruptions need SciPy", "'demur[corruptions]'")


def smooth(x: Array, sigma: float) -> Array:
    """Gaussian blur of each channel, cut at 4 sigma, with edge pixels repeated outside."""
    return np.asarray(_nd().gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4.0))


def disk_blur(x: Array, radius: float, sigma: float) -> Array:
    """Blur by a disk whose edge is softened by a 3 x 3 Gaussian, with images mirrored outside."""
    reach = int(radius) + 1
    offsets = np.arange(-reach, reach + 1)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).astype(np.float64)
    edge = np.exp(-np.array([1.0, 0.0, 1.0]) / (2 * sigma**2))
    kernel = _nd().correlate(
        disk / disk.sum(), np.outer(edge, edge) / edge.sum() ** 2, mode="constant"
    )
    return np.asarray(_nd().correlate(x, kernel[None, :, :, None], mode="mirror"))


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
    return np.asarray(x[:, :, first] * (1 - columns) + x[:, :, first + 1] * columns)


def sample(x: Array, rows: Array, columns: Array, repeat_edge: bool) -> Array:
    """Bilinear values of images (N, H, W, C) at positions (N, H, W), in pixels from the top left.

    Images are mirrored outside: the mirror repeats the edge pixel (b a | a b) or not (c b | a b).
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

    The noise is in [-1, 1] (N, S, S), S a power of two. The amplitude falls by `decay` squared from
    one level of detail to the next.
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
        noise = _nd().gaussian_filter(generator.standard_normal((size, size)), (width, length))
        angle = 36.0 * number + turn
        turned = _nd().rotate(noise / noise.std(), angle, reshape=False, order=1)
        inner = slice(size // 4, size // 4 + _TEXTURE_SIZE)
        ice += weight * np.exp(-2.0 * np.abs(turned[inner, inner]))
    cover = _nd().gaussian_filter(generator.standard_normal(ice.shape), 12)
    ice = np.clip(ice * (1.25 + 0.35 * cover / cover.std()), 0, 1)
    dark, bright = np.array(_ICE_DARK), np.array(_ICE_BRIGHT)
    return np.asarray(dark + ice[:, :, None] * (bright - dark)).astype(np.uint8)


def corrupt(images: Bytes, name: str, severity: int, index: ArrayLike, seed: int = 0) -> Bytes:
    """Return corrupted copies of images.

    Each image has its own random numbers, from `seed`, the corruption, the severity and its index:
    they do not depend on the other images.

    Args:
        images: Bytes (N, 32, 32, 3), red, green, blue; so is what is returned.
        name: One of `CORRUPTIONS`.
        severity: 1 to 5.
        index: Position of each image in its data set (N).
        seed: Another seed gives other random numbers.

    Example:
        >>> grey = np.full((1, 32, 32, 3), 100, np.uint8)
        >>> int(corrupt(grey, "brightness", 1, index=[0])[0, 0, 0, 0])  # 100 + 0.05 * 255
        112
    """
    check_request(name, severity)
    images = np.asarray(images)
    if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE, 3):
        raise BadInput(
            f"corruptions need uint8 images of shape N x {SIZE} x {SIZE} x 3, "
            f"not {images.dtype} of shape {' x '.join(map(str, images.shape))}"
        )
    positions = np.asarray(index)
    if positions.shape != (len(images),) or positions.dtype.kind not in "iu":
        raise BadInput(f"index must contain one whole number for each of {len(images)} images")
    if min(seed, positions.min(initial=0)) < 0:
        raise BadInput("seed and index must not be negative")
    function, constants = _CORRUPTIONS[name]
    key = [seed, CORRUPTIONS.index(name), severity]
    result = np.empty_like(images)
    for begin in range(0, len(images), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        generators = [np.random.default_rng([*key, int(i)]) for i in positions[chunk]]
        result[chunk] = function(images[chunk], constants[severity - 1], generators)
    return result


def check_request(name: str, severity: int) -> None:
    """Raise BadInput unless there is a corruption of this name and severity."""
    if name not in _CORRUPTIONS:
        raise BadInput(f"no corruption is called {name!r}; {suggestion(name, _CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise BadInput(f"severity must be a whole number from 1 to 5, not {severity!r}")


def _unit(x: Bytes) -> Array:
    return x.astype(np.float32) / np.float32(255)


def _bytes(x: NDArray[Any]) -> Bytes:
    """Bytes of values in [0, 1], rounded down as in the published script."""
    return np.asarray(np.clip(x, 0, 1) * 255).astype(np.uint8)


def _draw(generators: Generators, draw: Callable[[np.random.Generator], Any]) -> NDArray[Any]:
    return np.stack([draw(generator) for generator in generators])


def _gaussian_noise(x: Bytes, scale: float, generators: Generators) -> Bytes:
    noise = _draw(generators, lambda g: g.standard_normal(x.shape[1:], np.float32))
    return _bytes(_unit(x) + np.float32(scale) * noise)


def _shot_noise(x: Bytes, photons: float, generators: Generators) -> Bytes:
    mean = _unit(x).astype(np.float64) * photons
    counts = [g.poisson(m) for g, m in zip(generators, mean, strict=True)]
    return _bytes(np.stack(counts) / photons)


def _impulse_noise(x: Bytes, share: float, generators: Generators) -> Bytes:
    noise = _draw(generators, lambda g: g.random(x.shape[1:], np.float32))
    return np.where(noise < share / 2, 0, np.where(noise < share, 255, x)).astype(np.uint8)


def _glass_blur(x: Bytes, constants: tuple[float, int], generators: Generators) -> Bytes:
    sigma, passes = constants
    x = _bytes(smooth(_unit(x), sigma))
    image = np.arange(len(x))[:, None, None]
    # The script goes from the last pixel to the first and copies into each pixel one that comes
    # later in that order, so a pass reads no pixel that it has written.
    row, column = np.mgrid[2:SIZE, 2:SIZE]
    for _ in range(passes):
        back = _draw(generators, lambda g: g.integers(0, 2, (2, *row.shape)))
        x[:, 2:, 2:] = x[image, row - back[:, 0], column - back[:, 1]]
    return _bytes(smooth(_unit(x), sigma))


def _motion_blur(x: Bytes, constants: tuple[int, float], generators: Generators) -> Bytes:
    angle = _draw(generators, lambda g: g.uniform(-45, 45))
    blurred = motion_blur(x.astype(np.float32), *constants, angle)
    return (blurred + 0.5).astype(np.uint8)  # ImageMagick rounds to nearest


def _zoom_blur(x: Bytes, end: float, generators: Generators) -> Bytes:
    unit = _unit(x)
    factors = np.arange(1, end, 0.01)  # rounding includes the end 1.06 and 1.11, as published
    return _bytes(sum((centre_zoom(unit, f) for f in factors), unit) / (len(factors) + 1))


def _snow(x: Bytes, constants: tuple[float, ...], generators: Generators) -> Bytes:
    mean, scale, zoom, threshold, radius, sigma, mix = constants
    noise = _draw(generators, lambda g: g.standard_normal((SIZE, SIZE, 1), np.float32))
    flakes = centre_zoom(mean + scale * noise, zoom)
    flakes = np.where(flakes < threshold, 0, flakes)
    angle = _draw(generators, lambda g: g.uniform(-135, -45))
    streaks = motion_blur(_bytes(flakes).astype(np.float32), int(radius), sigma, angle)
    layer = _unit((streaks + 0.5).astype(np.uint8))
    unit = _unit(x)
    grey = 0.299 * unit[..., :1] + 0.587 * unit[..., 1:2] + 0.114 * unit[..., 2:]
    whitened = np.maximum(unit, 1.5 * grey + 0.5)
    return _bytes(mix * unit + (1 - mix) * whitened + layer + layer[:, ::-1, ::-1])


def _frost(x: Bytes, constants: tuple[float, float], generators: Generators) -> Bytes:
    textures = procedural_frost()

    def crop(generator: np.random.Generator) -> Bytes:
        texture = textures[int(generator.integers(len(textures)))]
        top, left = (int(generator.integers(length - SIZE)) for length in texture.shape[:2])
        return texture[top : top + SIZE, left : left + SIZE]

    weight, frost_weight = constants
    return _bytes(weight * _unit(x) + frost_weight * _unit(_draw(generators, crop)))


def _fog(x: Bytes, constants: tuple[float, float], generators: Generators) -> Bytes:
    amount, decay = constants
    noise = _draw(generators, lambda g: g.uniform(-1, 1, (SIZE, SIZE)))
    unit = _unit(x)
    highest = unit.max((1, 2, 3), keepdims=True)
    return _bytes((unit + amount * plasma(noise, decay)[..., None]) * highest / (highest + amount))


def _brightness(x: Bytes, amount: float, generators: Generators) -> Bytes:
    unit = _unit(x)
    value = unit.max(3, keepdims=True)  # the V of HSV
    # with hue and saturation fixed a pixel is proportional to V; black has no hue and turns grey
    ratio = np.divide(unit, value, out=np.ones_like(unit), where=value > 0)
    return _bytes(ratio * np.minimum(value + amount, 1))


def _contrast(x: Bytes, scale: float, generators: Generators) -> Bytes:
    mean = x.mean((1, 2), np.float64, keepdims=True) / 255  # sums of bytes are exact
    return _bytes((_unit(x) - mean) * scale + mean)


def _elastic_transform(x: Bytes, constants: tuple[float, ...], generators: Generators) -> Bytes:
    """An affine map that moves three points at random, then smooth random displacements."""
    strength, sigma, reach = (SIZE * constant for constant in constants)
    points = SIZE // 2 + SIZE // 3 * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    moved = points + _draw(generators, lambda g: g.uniform(-reach, reach, (3, 2)))
    # the inverse map takes (column, row, 1) of the result to (column, row) of the image
    homogeneous = np.concatenate([moved, np.ones((len(x), 3, 1))], 2)
    inverse = np.linalg.solve(homogeneous, np.broadcast_to(points, moved.shape))
    a, b, c = (inverse[:, i, :, None, None] for i in range(3))
    row, column = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    origin = (a * column + b * row + c).astype(np.float32)
    warped = sample(_unit(x), origin[:, 1], origin[:, 0], repeat_edge=False)
    noise = _draw(generators, lambda g: g.uniform(-1, 1, (2, SIZE, SIZE)))
    shift = strength * _nd().gaussian_filter(noise, (0, 0, sigma, sigma), truncate=3.0)
    shift = shift.astype(np.float32)
    return _bytes(sample(warped, row + shift[:, 0], column + shift[:, 1], repeat_edge=True))


def _pixelate(x: Bytes, scale: float, generators: Generators) -> Bytes:
    pillow = import_pillow()
    small, box = (int(SIZE * scale),) * 2, pillow.Resampling.BOX
    resized = [pillow.fromarray(i).resize(small, box).resize((SIZE, SIZE), box) for i in x]
    return np.stack([np.asarray(image) for image in resized])


def _jpeg_compression(x: Bytes, quality: int, generators: Generators) -> Bytes:
    pillow = import_pillow()

    def compress(image: Bytes) -> Bytes:
        file = io.BytesIO()
        pillow.fromarray(image).save(file, "JPEG", quality=quality)
        return np.asarray(pillow.open(file, formats=["JPEG"]))

    return np.stack([compress(image) for image in x])


# A function of images, constants and one generator per image, with its constants by severity.
_CORRUPTIONS: dict[str, tuple[Callable[..., Bytes], tuple[Any, Any, Any, Any, Any]]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (
        lambda x, constants, _: _bytes(disk_blur(_unit(x), *constants)),
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    ),
    "glass_blur": (_glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    "motion_blur": (_motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (_zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26)),
    "snow": (_snow, (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9), (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )),
    "frost": (_frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (_fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": (_elastic_transform, (  # over the width
        (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03),
    )),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (_jpeg_compression, (80, 65, 58, 50, 40)),
}  # fmt: skip
CORRUPTIONS = tuple(_CORRUPTIONS)
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
