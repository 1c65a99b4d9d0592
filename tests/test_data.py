"""Data sets, their splits and augmentation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from demur.data import DATASETS, SPLITS, Dataset, Digits, OwnImages
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


GOLDEN = {"fit": "ab98c94b", "val": "749b9899", "cal": "fd1b77e2", "test": "86ec42e5"}
