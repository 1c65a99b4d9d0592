"""Augmentation of training images, against Pillow and by its random draws."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from demur.data import AUGMENTS, IDBH, Augment, CropFlip, NoAugment
from demur.data import augment as augmentation
from demur.errors import BadInput

INDEX = torch.arange(6)


def test_no_augmentation_returns_the_same_images() -> None:
    x = torch.rand(6, 1, 8, 8)
    assert NoAugment()(x, 0, INDEX, 0) is x


def test_crop_moves_the_image_by_at_most_pad_and_fills_with_zero() -> None:
    x = torch.zeros(500, 1, 9, 9)
    x[:, :, 4, 4] = 1
    index = torch.arange(500)
    moved = CropFlip(pad=2, flip=False)(x, 0, index, 0)
    pixel = moved.flatten(1).argmax(1)
    offsets = torch.stack([pixel // 9 - 4, pixel % 9 - 4], 1)
    assert offsets.abs().max() == 2
    assert len(offsets.unique(dim=0)) == 25
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(500))


def test_flip_mirrors_about_half_of_the_images() -> None:
    x = torch.rand(1000, 3, 4, 4)
    out = CropFlip(pad=0, flip=True)(x, 0, torch.arange(1000), 0)
    mirrored = (out == x.flip(-1)).flatten(1).all(1)
    same = (out == x).flatten(1).all(1)
    assert (mirrored | same).all()
    assert 400 < int(mirrored.sum()) < 600


def test_reflect_fill_has_no_black_border() -> None:
    x = torch.ones(50, 1, 8, 8)
    index = torch.arange(50)
    assert CropFlip(pad=2, flip=False, fill="reflect")(x, 0, index, 0).min() == 1
    assert CropFlip(pad=2, flip=False)(x, 0, index, 0).min() == 0


@pytest.mark.parametrize("cls", AUGMENTS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 12)], ids=str)
def test_augmentation_is_seeded_per_image(cls: type[Augment], shape: tuple[int, ...]) -> None:
    x, augment = torch.rand(6, *shape), cls()
    augmented = augment(x, 3, INDEX, 1)
    assert augmented.shape == x.shape
    assert augmented.min() >= 0 and augmented.max() <= 1
    assert torch.equal(augmented, augment(x, 3, INDEX, 1))
    assert torch.allclose(augmented[2:4], augment(x[2:4], 3, INDEX[2:4], 1), atol=1e-6)
    assert cls is NoAugment or not torch.equal(augmented, augment(x, 3, INDEX, 2))


def photo(seed: int) -> tuple[Image.Image, Tensor]:
    """A smooth colour image for Pillow, and as a tensor 1, 3, 32, 32."""
    coarse = np.random.default_rng(seed).integers(20, 230, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((32, 32), Image.Resampling.BICUBIC)
    return image, tensor_of(image)


def tensor_of(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0)[None].float() / 255


@pytest.mark.parametrize("magnitude", [0.0, 0.3, 0.99])
@pytest.mark.parametrize(
    ("operation", "enhance"),
    list(enumerate([
        ImageEnhance.Color, ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Sharpness,
    ])),
)  # fmt: skip
def test_colours_are_those_of_pillow(
    operation: int, enhance: type[ImageEnhance.Color], magnitude: float
) -> None:
    image, x = photo(operation)
    low, high = augmentation.LOWEST_FACTORS[operation], augmentation.HIGHEST_FACTOR
    expected = tensor_of(enhance(image).enhance(low + (high - low) * magnitude))
    found = augmentation._coloured(x, torch.tensor([operation]), torch.tensor([magnitude]))
    assert (found - expected).abs().max() < 2 / 255  # Pillow rounds to 8 bits, twice


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        (augmentation.AUTOCONTRAST, ImageOps.autocontrast),
        (augmentation.EQUALISE, ImageOps.equalize),
    ],
)
def test_histograms_are_those_of_pillow(operation: int, function: object) -> None:
    assert callable(function)
    image, _ = photo(operation)
    flat = Image.new("RGB", (32, 32), (9, 9, 9))  # a constant image stays
    for picture in (image, flat):
        found = augmentation._coloured(
            tensor_of(picture), torch.tensor([operation]), torch.tensor([0.5])
        )
        assert (found - tensor_of(function(picture))).abs().max() < 1.01 / 255


def test_rotations_are_those_of_pillow() -> None:
    image, x = photo(3)
    for sign, direction in ((0.1, 1), (0.9, -1)):
        rows, columns = augmentation._affine(
            torch.tensor([augmentation.ROTATE]), torch.tensor([0.95]), torch.tensor([sign]),
            torch.tensor([0.1]), 32, 32,
        )  # fmt: skip
        inside = (rows >= 0) & (rows < 32) & (columns >= 0) & (columns < 32)
        found = x[0, :, rows[0].clamp(0, 31), columns[0].clamp(0, 31)] * inside[0]
        rotated = image.rotate(10 * direction, resample=Image.Resampling.NEAREST)
        assert (found - tensor_of(rotated)[0]).abs().gt(1e-6).float().mean() < 0.01


def test_crop_shift_cuts_at_most_shift_rows_and_columns_together() -> None:
    count = 4000
    position = torch.arange(32).expand(count, 1, 32)
    draw = torch.rand(4, count, generator=torch.Generator().manual_seed(0))
    cut = (draw[0] * 11).floor().long()
    source, inside = augmentation._crop_shift(position, cut, draw[1], draw[2], 32)
    assert torch.equal(inside.sum((1, 2)), 32 - cut)
    first = source.masked_fill(~inside, 99).amin((1, 2))
    assert (first >= 0).all() and (first <= cut).all()
    at_ten = cut == 10
    assert set(first[at_ten].tolist()) == set(range(11)), "every place of the window is drawn"
    placed = inside.float().argmax(2)[:, 0][at_ten]
    assert set(placed.tolist()) == set(range(11))


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_erasing_removes_one_rectangle_of_2_to_33_percent(probability: float) -> None:
    count = 1000
    augment = IDBH(erase=probability, shift=0)
    draw = torch.rand(count, 41, generator=torch.Generator().manual_seed(1))
    x = augment._erased(torch.ones(count, 1, 32, 32), draw[:, 0], draw[:, 1:].view(count, 4, 10))
    erased = x[:, 0] == 0
    share = erased.float().mean((1, 2))
    assert abs(float((share > 0).float().mean()) - probability) < 0.06
    some = erased[share > 0]
    rows, columns = some.any(2).sum(1), some.any(1).sum(1)
    assert torch.equal(some.sum((1, 2)), rows * columns), "a rectangle"
    if probability:
        assert float(share[share > 0].min()) > 0.01 and float(share.max()) < 0.36


def test_each_operation_is_drawn_equally_often() -> None:
    _, x = photo(0)
    x = x.expand(2000, -1, -1, -1)
    plain = IDBH(erase=0.0, shift=0)(x, 0, torch.arange(2000), 0)
    mirrored = torch.where((plain == 0).all(1).any((1, 2))[:, None, None, None], 0, plain)
    moved = (mirrored == 0).flatten(1).all(1).float().mean()  # sheared or rotated: black corners
    assert 0.2 < float(moved) < 0.3


def test_a_reflecting_crop_needs_larger_images() -> None:
    with pytest.raises(BadInput, match="reflect padding of 8 pixels needs larger images"):
        CropFlip(pad=8, fill="reflect")(torch.rand(2, 1, 8, 8), 0, torch.arange(2), 0)
