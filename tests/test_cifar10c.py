"""CIFAR-10-C from released files, or generated from CIFAR-10."""

from pathlib import Path

import numpy as np
import pytest

from demur.data import CIFAR10, Images
from demur.data.corruptions import Bytes, corrupt, find_source
from demur.errors import BadInput
from tests.cifar_files import BATCH, use_small_set

TOTAL = 5 * BATCH


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a small CIFAR-10 of 20 test images."""
    use_small_set(CIFAR10, monkeypatch, tmp_path)
    return tmp_path


def release(folder: Path, name: str) -> Bytes:
    """Write random images as released files."""
    released = folder / "CIFAR-10-C"
    released.mkdir(exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (TOTAL, 32, 32, 3), np.uint8)
    np.save(released / f"{name}.npy", images)
    return images


def as_rows(images: Images) -> Bytes:
    return np.asarray(images.pixels.permute(0, 2, 3, 1))


def corrupted(folder: Path, name: str, severity: int, seed: int = 0) -> Bytes:
    """The test images under one corruption."""
    test, source = CIFAR10().load(folder)["test"], find_source(folder, name)
    return source.corrupt(as_rows(test), test.index.numpy(), severity, seed)


def test_generated_from_the_test_images(folder: Path) -> None:
    test = CIFAR10().load(folder)["test"]
    assert find_source(folder, "fog").kind == "generated"
    fog = corrupted(folder, "fog", 3)
    assert np.array_equal(fog, corrupt(as_rows(test), "fog", 3, test.index.numpy()))
    assert not np.array_equal(corrupted(folder, "fog", 3, seed=1), fog)


@pytest.mark.parametrize("severity", [1, 4])
def test_released_files_are_preferred(folder: Path, severity: int) -> None:
    images = release(folder, "fog")
    assert find_source(folder, "fog").kind == "released"
    assert find_source(folder / "CIFAR-10-C", "fog").kind == "released"
    fog = corrupted(folder, "fog", severity)
    assert np.array_equal(fog, images[(severity - 1) * BATCH : severity * BATCH])


def damage_file(path: Path, how: str) -> None:
    whole = path.read_bytes()
    array = np.load(path)
    if how == "truncated":
        path.write_bytes(whole[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "header":
        path.write_bytes(whole[:20])
    elif how == "syntax":
        path.write_bytes(whole.replace(b"}", b">", 1))
    elif how == "text":
        path.write_bytes(b"<html>not found</html>")
    elif how == "archive":
        path.write_bytes(b"PK\x03\x04 damaged")
    elif how == "pickle":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif how == "shape":
        np.save(path, array[:-1])
    elif how == "dtype":
        np.save(path, array.astype(np.float32))
    else:
        with path.open("wb") as file:
            np.savez(file, array)


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "empty",
        "header",
        "syntax",
        "text",
        "archive",
        "pickle",
        "shape",
        "dtype",
        "npz",
    ],
)
def test_a_damaged_released_file(folder: Path, how: str) -> None:
    release(folder, "fog")
    damage_file(folder / "CIFAR-10-C" / "fog.npy", how)
    with pytest.raises(BadInput, match=r"fog\.npy (is not|must contain).*; delete it and unpack"):
        corrupted(folder, "fog", 1)


@pytest.mark.parametrize(
    ("name", "severity", "message"),
    [("frog", 1, "no corruption is called 'frog'"), ("fog", 0, "severity must be")],
)
def test_bad_requests(folder: Path, name: str, severity: int, message: str) -> None:
    release(folder, "fog")
    with pytest.raises(BadInput, match=message):
        corrupted(folder, name, severity)
