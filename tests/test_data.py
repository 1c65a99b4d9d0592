"""Data sets, their splits and augmentation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from demur.data import (
    AUGMENTS,
    DATASETS,
    SPLITS,
    CropFlip,
    Dataset,
    Digits,
    NoAugment,
    OwnImages,
    dataset,
)
from demur.data.cifar import Cifar
from demur.errors import BadInput
from demur.images import check_batch
from tests.cifar_files import use_small_set
from tests.own_images import write_folder

INDEX = torch.arange(6)


@pytest.mark.parametrize("kind", DATASETS)
def test_every_data_set_meets_the_interface(
    kind: type[Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR is read from small files; test_cifar.py tests the real ones."""
    if issubclass(kind, Cifar):
        use_small_set(kind, monkeypatch, tmp_path)
    data = kind()
    if isinstance(data, OwnImages):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        folder = tmp_path = write_folder(tmp_path / "photos")
        data = OwnImages(str(folder)).prepared()
    splits = data.load(tmp_path)
    assert tuple(splits) == SPLITS
    index = torch.cat([split.index for split in splits.values()])
    assert len(index.unique()) == len(index), "splits share images"
    for split in splits.values():
        x, y = split.batch(slice(None))
        check_batch(x, y, data.domain.classes)
        assert x.shape[1:] == data.domain.shape
    assert len(data.domain.mean) == len(data.domain.std) == data.domain.shape[0]
    assert data.threat.linf_step <= data.threat.linf < 1
    assert data.threat.l2_step <= data.threat.l2
    assert splits["test"].digest() == data.load(tmp_path)["test"].digest()


def test_digits_have_the_stated_statistics() -> None:
    splits, domain = Digits().load(), Digits.domain
    assert all(len(split.y.unique()) == domain.classes for split in splits.values())
    fit = splits["fit"].batch(slice(None))[0]
    assert fit.mean((0, 2, 3)).tolist() == pytest.approx(list(domain.mean), abs=0.01)
    assert fit.std((0, 2, 3)).tolist() == pytest.approx(list(domain.std), abs=0.01)


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    bundle, splits = load_digits(), Digits().load()
    assert sum(len(s) for s in splits.values()) == len(bundle.target) == 1797
    assert {name: len(split) for name, split in splits.items()} == {
        "fit": 1150, "val": 150, "cal": 197, "test": 300,
    }  # fmt: skip
    split = splits["cal"]
    x, y = split.batch(slice(None))
    assert np.allclose(x[:, 0] * 16, bundle.images[split.index])
    assert np.array_equal(y, bundle.target[split.index])


def test_digits_load_through_scikit_learn_if_its_file_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = Digits().load()
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    for name, split in Digits().load().items():
        assert split.digest() == expected[name].digest()


def test_splits_are_frozen() -> None:
    """Stored runs and records refer to these images, so they must never change."""
    found = {name: split.digest()[:8] for name, split in Digits().load().items()}
    assert found == GOLDEN


def test_first_returns_the_first_images_and_rejects_impossible_counts() -> None:
    test = Digits().load()["test"]
    assert len(test.first(7)) == 7
    assert torch.equal(test.first(7).index, test.index[:7])
    for count in (0, 301):
        with pytest.raises(BadInput, match="300"):
            test.first(count)


def test_every_augmentation_is_covered() -> None:
    assert set(AUGMENTS) == {NoAugment, CropFlip}


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


def test_augmentation_is_seeded_per_image() -> None:
    x, augment = torch.rand(6, 1, 8, 8), CropFlip(pad=2)
    augmented = augment(x, 3, INDEX, 1)
    assert torch.equal(augmented, augment(x, 3, INDEX, 1))
    assert torch.equal(augmented[2:4], augment(x[2:4], 3, INDEX[2:4], 1))
    assert not torch.equal(augmented, augment(x, 3, INDEX, 2))


GOLDEN = {"fit": "ab98c94b", "val": "749b9899", "cal": "fd1b77e2", "test": "86ec42e5"}
