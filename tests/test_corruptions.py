"""The 15 corruptions of CIFAR-10-C, against closed forms and slow references."""

import colorsys
import io
import sys
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from demur.data import corruptions
from demur.data.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    Bytes,
    centre_zoom,
    corrupt,
    disk_blur,
    motion_blur,
    plasma,
    procedural_frost,
    sample,
)
from demur.data.dataset import Digits
from demur.errors import BadInput
from demur.paper.published import PAPER_CORRUPTIONS

RANDOM = [n for n in CORRUPTIONS if n.endswith("noise")] + [
    "glass_blur", "motion_blur", "snow", "frost", "fog", "elastic_transform",
]  # fmt: skip
# published constants weaken one part of these while they strengthen another
NOT_MONOTONE = ("glass_blur", "frost", "elastic_transform")


def smooth_images(count: int = 24) -> Bytes:
    noise = np.random.default_rng(0).standard_normal((count, 32, 32, 3))
    smooth = ndimage.gaussian_filter(noise, (0, 1.5, 1.5, 0))
    images: Bytes = np.clip(128 + 55 * smooth / smooth.std(), 0, 255).astype(np.uint8)
    return images


def digit_images(count: int = 24) -> Bytes:
    grey = (Digits().load()["test"].first(count).pixels[:, 0].numpy() * 15.9).astype(np.uint8)
    large = [Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC) for image in grey]
    return np.stack([np.stack([np.asarray(image)] * 3, 2) for image in large])


def by_severity(*constants: float) -> list[tuple[int, float]]:
    return list(zip(SEVERITIES, constants, strict=True))


IMAGES = np.concatenate([smooth_images(), digit_images()])
INDEX = np.arange(len(IMAGES))


def close(a: Bytes, b: np.ndarray, levels: int = 1) -> bool:
    return bool(np.abs(a.astype(int) - b.astype(int)).max() <= levels)


def test_names_in_published_order() -> None:
    assert CORRUPTIONS == (
        "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur",
        "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast",
        "elastic_transform", "pixelate", "jpeg_compression",
    )  # fmt: skip
    assert PAPER_CORRUPTIONS == (
        "glass_blur", "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness",
        "contrast", "elastic_transform", "jpeg_compression",
    )  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_bytes_that_change_more_with_severity(name: str) -> None:
    """Also: the input is left as it is, and every image changes."""
    before = IMAGES.copy()
    made = [corrupt(IMAGES, name, severity, INDEX) for severity in SEVERITIES]
    assert np.array_equal(IMAGES, before)
    assert all(images.shape == IMAGES.shape and images.dtype == np.uint8 for images in made)
    change = [((images.astype(float) - IMAGES) ** 2).mean() for images in made]
    assert min(change) > 0.1
    if name not in NOT_MONOTONE:
        # motion blur 3 and 4 differ only in the length of the line, pixelate 2 and 3 by one pixel
        assert all(more > 0.9 * less for less, more in pairwise(change))
        assert change[4] > 1.5 * change[0]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_does_not_depend_on_the_others(name: str) -> None:
    together = corrupt(IMAGES, name, 5, INDEX)
    order = np.array([40, 3, 17])
    assert np.array_equal(corrupt(IMAGES[order], name, 5, INDEX[order]), together[order])
    assert np.array_equal(corrupt(IMAGES[3:4], name, 5, [3]), together[3:4])


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_depend_on_seed_index_and_severity(name: str) -> None:
    image = IMAGES[:1]
    first = corrupt(image, name, 3, [0])
    assert not np.array_equal(corrupt(image, name, 3, [0], seed=1), first)
    assert not np.array_equal(corrupt(image, name, 3, [1]), first)


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - set(RANDOM)))
def test_the_others_have_no_random_numbers(name: str) -> None:
    assert np.array_equal(
        corrupt(IMAGES, name, 3, INDEX), corrupt(IMAGES, name, 3, INDEX + 7, seed=1)
    )


def test_no_image_gives_no_image() -> None:
    assert corrupt(IMAGES[:0], "fog", 1, INDEX[:0]).shape == (0, 32, 32, 3)


@pytest.mark.parametrize(("severity", "scale"), by_severity(0.04, 0.06, 0.08, 0.09, 0.1))
def test_gaussian_noise(severity: int, scale: float) -> None:
    grey = np.full((8, 32, 32, 3), 128, np.uint8)
    noise = corrupt(grey, "gaussian_noise", severity, range(8)) - 128.0
    assert noise.std() == pytest.approx(255 * scale, rel=0.02)
    assert noise.mean() == pytest.approx(-0.5, abs=0.6), "rounded down"


@pytest.mark.parametrize(("severity", "photons"), by_severity(500, 250, 100, 75, 50))
def test_shot_noise(severity: int, photons: int) -> None:
    grey = np.full((8, 32, 32, 3), 128, np.uint8)
    noise = corrupt(grey, "shot_noise", severity, range(8)) - 128.0
    assert noise.std() == pytest.approx(255 * np.sqrt(128 / 255 / photons), rel=0.02)


@pytest.mark.parametrize(("severity", "share"), by_severity(0.01, 0.02, 0.03, 0.05, 0.07))
def test_impulse_noise(severity: int, share: float) -> None:
    grey = np.full((32, 32, 32, 3), 128, np.uint8)
    made = corrupt(grey, "impulse_noise", severity, range(32))
    assert set(np.unique(made)) == {0, 128, 255}
    assert (made == 0).mean() == pytest.approx(share / 2, rel=0.1)
    assert (made == 255).mean() == pytest.approx(share / 2, rel=0.1)


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.4), (2, 0.5), (3, 0.6)])
def test_a_disk_of_one_pixel_is_a_gaussian(severity: int, sigma: float) -> None:
    edge = np.exp(-np.array([1, 0, 1]) / (2 * sigma**2))
    edge /= edge.sum()
    wanted = ndimage.correlate1d(IMAGES / 255.0, edge, 1, mode="mirror")
    wanted = ndimage.correlate1d(wanted, edge, 2, mode="mirror") * 255
    assert close(corrupt(IMAGES, "defocus_blur", severity, INDEX), wanted)


def test_a_disk_of_radius_1_5_is_a_square() -> None:
    wanted = ndimage.uniform_filter(IMAGES / 255.0, (0, 3, 3, 0), mode="mirror") * 255
    assert close(corrupt(IMAGES, "defocus_blur", 5, INDEX), wanted)
    cross = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]]) / 5
    wanted = ndimage.correlate(IMAGES / 255.0, cross[None, :, :, None], mode="mirror")
    assert np.allclose(disk_blur(IMAGES / 255.0, 1, 0.2), wanted, atol=1e-4)


def test_glass_blur_copies_pixel_by_pixel() -> None:
    """The published loop: from the last pixel to the first, one copied over the other."""
    image = IMAGES[0].copy()
    # at severity 1 the blur is narrower than a pixel
    back = np.random.default_rng([0, CORRUPTIONS.index("glass_blur"), 1, 0]).integers(
        0, 2, (2, 30, 30)
    )
    for row in range(31, 1, -1):
        for column in range(31, 1, -1):
            down, right = back[:, row - 2, column - 2]
            image[row, column] = image[row - down, column - right]
    assert np.array_equal(corrupt(IMAGES[:1], "glass_blur", 1, [0])[0], image)


def test_motion_blur_averages_along_a_half_line() -> None:
    point = np.zeros((2, 32, 32, 1), np.float32)
    point[:, 16, 16] = 1
    blurred = motion_blur(point, radius=3, sigma=2.0, angle=np.array([0.0, -90.0]))[..., 0]
    weights = np.exp(-(np.arange(7) ** 2) / 8)
    weights /= weights.sum()
    assert np.allclose(blurred[0, 16, 10:17], weights[::-1], atol=1e-6)
    assert np.allclose(blurred[1, 16:23, 16], weights, atol=1e-6)
    assert blurred.sum((1, 2)) == pytest.approx([1, 1])
    flat = np.full((1, 32, 32, 3), 0.25, np.float32)
    assert np.allclose(motion_blur(flat, 9, 2.5, np.array([30.0])), flat)


@pytest.mark.parametrize("factor", [1.0, 1.03, 1.1, 1.25, 1.75, 2.25])
def test_centre_zoom_is_scipys(factor: float) -> None:
    x = IMAGES[:2] / 255.0
    part = int(np.ceil(32 / factor))
    top = (32 - part) // 2
    cut = x[:, top : top + part, top : top + part]
    wanted = ndimage.zoom(cut, (1, factor, factor, 1), order=1)
    crop = (wanted.shape[1] - 32) // 2
    wanted = wanted[:, crop : crop + 32, crop : crop + 32]
    assert np.allclose(centre_zoom(x, factor), wanted, atol=1e-6)


def test_zoom_blur_is_the_mean_of_zooms() -> None:
    x = IMAGES / 255.0
    factors = [1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    wanted = (x + sum(centre_zoom(x, factor) for factor in factors)) / 8 * 255
    assert close(corrupt(IMAGES, "zoom_blur", 1, INDEX), wanted)


def test_snow_on_black_and_on_white() -> None:
    black, white = np.zeros((16, 32, 32, 3), np.uint8), np.full((16, 32, 32, 3), 255, np.uint8)
    assert (corrupt(white, "snow", 5, range(16)) == 255).all()
    snow = corrupt(black, "snow", 1, range(16))
    assert (snow[..., 0] == snow[..., 2]).all()
    assert snow.min() == int((1 - 0.95) * 0.5 * 255)
    assert np.array_equal(snow, snow[:, ::-1, ::-1]), "the layer and the layer turned by 180"
    assert 0.05 < (snow > snow.min()).mean() < 0.5


def test_frost_adds_a_crop_of_a_texture(monkeypatch: pytest.MonkeyPatch) -> None:
    black = np.zeros((4, 32, 32, 3), np.uint8)
    texture = np.broadcast_to(np.arange(33, dtype=np.uint8)[:, None, None], (33, 33, 3))
    monkeypatch.setattr(corruptions, "procedural_frost", lambda: [texture])
    made = corrupt(black, "frost", 5, range(4))
    assert np.array_equal(made[0], (texture[:32, :32] * 0.45).astype(np.uint8))
    grey, wider = np.full((4, 32, 32, 3), 100, np.uint8), np.full((40, 50, 3), 200, np.uint8)
    monkeypatch.setattr(corruptions, "procedural_frost", lambda: [wider])
    assert (corrupt(grey, "frost", 5, range(4)) == 165).all()


def test_frost_textures_are_five_bluish_ones() -> None:
    textures = procedural_frost()
    assert len(textures) == 5
    for texture in textures:
        red, _, blue = texture.mean((0, 1))
        assert 90 < red < blue < 190
        assert texture.std() > 30


def test_fog_of_a_flat_image_is_a_plasma_fractal() -> None:
    grey = np.full((8, 32, 32, 3), 51, np.uint8)  # 0.2
    made = corrupt(grey, "fog", 2, range(8)) / 255
    low, high = 0.2 * 0.2 / 0.7, 0.7 * 0.2 / 0.7
    assert made.min((1, 2, 3)) == pytest.approx([low] * 8, abs=1 / 255)
    assert made.max((1, 2, 3)) == pytest.approx([high] * 8, abs=1 / 255)


def test_plasma_takes_means_of_four_neighbours() -> None:
    """Noise only at the first level leaves bilinear-like means at the later ones."""
    noise = np.zeros((1, 4, 4))
    noise[0, 2, 2] = 1  # the centre of the only square
    heights = plasma(noise, decay=2.0)[0]
    assert heights[0, 0] == 0
    assert heights[2, 2] == 1
    assert heights[0, 2] == heights[2, 0] == 0.5, "two corners and the centre twice"
    assert heights[1, 1] == 0.5
    assert heights[0, 1] == pytest.approx((0 + 0.5 + 0.5 + 0.5) / 4)


@pytest.mark.parametrize(("severity", "amount"), by_severity(0.05, 0.1, 0.15, 0.2, 0.3))
def test_brightness_adds_to_the_value_of_hsv(severity: int, amount: float) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (1, 32, 32, 3), np.uint8)
    pixels[0, 0] = 0
    made = corrupt(pixels, "brightness", severity, [0])
    for before, after in zip(pixels.reshape(-1, 3), made.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(before / 255))
        wanted = colorsys.hsv_to_rgb(hue, saturation, min(value + amount, 1))
        assert close(after, 255 * np.array(wanted))


@pytest.mark.parametrize(("severity", "scale"), by_severity(0.75, 0.5, 0.4, 0.3, 0.15))
def test_contrast_scales_about_the_mean_of_each_channel(severity: int, scale: float) -> None:
    mean = IMAGES.mean((1, 2), keepdims=True)
    wanted = (IMAGES - mean) * scale + mean
    assert close(corrupt(IMAGES, "contrast", severity, INDEX), wanted)


@pytest.mark.parametrize(("repeat_edge", "mode"), [(True, "reflect"), (False, "mirror")])
def test_sample_is_scipys_map_coordinates(repeat_edge: bool, mode: str) -> None:
    x = IMAGES[:3] / 255.0
    rows, columns = np.random.default_rng(2).uniform(-20, 52, (2, 3, 32, 32))
    got = sample(x, rows, columns, repeat_edge)
    for image, made, row, column in zip(x, got, rows, columns, strict=True):
        for channel in range(3):
            wanted = ndimage.map_coordinates(image[..., channel], [row, column], order=1, mode=mode)
            assert np.allclose(made[..., channel], wanted, atol=1e-6)


def test_elastic_severity_1_is_an_affine_map() -> None:
    """A linear image stays linear inside; its slopes change."""
    ramp = np.broadcast_to((np.arange(32) * 8)[None, :, None], (32, 32, 3)).astype(np.uint8)
    made = corrupt(ramp[None], "elastic_transform", 1, [0])[0].astype(float)
    inside = made[10:22, 10:22, 0]
    for axis in (0, 1):
        steps = np.diff(inside, axis=axis)
        assert steps.max() - steps.min() <= 2
    assert np.abs(made - ramp).max() > 8


@pytest.mark.parametrize(("severity", "size"), by_severity(30, 28, 27, 24, 20))
def test_pixelate_is_pillows_box(severity: int, size: int) -> None:
    small = Image.fromarray(IMAGES[0]).resize((size, size), Image.Resampling.BOX)
    wanted = np.asarray(small.resize((32, 32), Image.Resampling.BOX))
    assert np.array_equal(corrupt(IMAGES[:1], "pixelate", severity, [0])[0], wanted)


@pytest.mark.parametrize(("severity", "quality"), by_severity(80, 65, 58, 50, 40))
def test_jpeg_is_pillows(severity: int, quality: int) -> None:
    file = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(file, "JPEG", quality=quality)
    wanted = np.asarray(Image.open(file))
    assert np.array_equal(corrupt(IMAGES[:1], "jpeg_compression", severity, [0])[0], wanted)


@pytest.mark.parametrize(
    ("images", "name", "severity", "index", "seed", "message"),
    [
        (IMAGES, "frog", 1, INDEX, 0, "no corruption is called 'frog'; did you mean f"),
        (IMAGES, "fog", 6, INDEX, 0, "severity must be a whole number from 1 to 5, not 6"),
        (IMAGES / 255.0, "fog", 1, INDEX, 0, "not float64 of shape 48 x 32 x 32 x 3"),
        (IMAGES[:, :28], "fog", 1, INDEX, 0, "not uint8 of shape 48 x 28 x 32 x 3"),
        (IMAGES, "fog", 1, INDEX[:3], 0, "one whole number for each of 48 images"),
        (IMAGES, "fog", 1, INDEX - 1, 0, "must not be negative"),
        (IMAGES, "fog", 1, INDEX, -1, "must not be negative"),
    ],
)
def test_bad_requests(
    images: Bytes, name: str, severity: int, index: Bytes, seed: int, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        corrupt(images, name, severity, index, seed)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "PIL.Image"):  # another test may have imported both
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=r"need Pillow; install it with pip .*demur\[images\]"):
        corrupt(IMAGES, "pixelate", 1, INDEX)
