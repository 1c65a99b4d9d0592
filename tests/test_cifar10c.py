"""CIFAR-10-C from released files, or generated from CIFAR-10."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demur.data import CIFAR10, Images
from demur.data.cifar10c import FROST_FILES, corrupted_images, corrupted_sets
from demur.data.corruptions import Bytes, corrupt
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
    np.save(released / "labels.npy", np.tile(np.arange(BATCH, dtype=np.uint8) % 10, 5))
    return images


def as_rows(images: Images) -> Bytes:
    return np.asarray(images.pixels.permute(0, 2, 3, 1))


def test_generated_from_the_test_images(folder: Path) -> None:
    test = CIFAR10().load(folder)["test"]
    fog = corrupted_images(folder, "fog", 3)
    assert (fog.name, fog.severity, fog.source) == ("fog", 3, "generated")
    assert fog.images.y.equal(test.y)
    assert fog.images.index.equal(test.index)
    assert fog.images.levels == 255
    wanted = corrupt(as_rows(test), "fog", 3, test.index.numpy())
    assert np.array_equal(as_rows(fog.images), wanted)
    assert not corrupted_images(folder, "fog", 3, seed=1).images.pixels.equal(fog.images.pixels)


@pytest.mark.parametrize("severity", [1, 4])
def test_released_files_are_preferred(folder: Path, severity: int) -> None:
    images = release(folder, "fog")
    fog = corrupted_images(folder, "fog", severity)
    assert fog.source == "released"
    assert np.array_equal(as_rows(fog.images), images[(severity - 1) * BATCH : severity * BATCH])
    assert fog.images.y.tolist() == [*range(10)] * 2
    assert fog.images.index.equal(CIFAR10().load(folder)["test"].index)


def test_released_files_need_no_cifar10(folder: Path) -> None:
    release(folder, "fog")
    elsewhere = folder / "elsewhere"
    (folder / "CIFAR-10-C").rename(elsewhere)
    assert corrupted_images(elsewhere, "fog", 1).source == "released"


def test_neither_released_nor_cifar10(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="CIFAR-10 is not in"):
        corrupted_images(tmp_path, "fog", 1)


def test_several_sets_and_their_sources(folder: Path) -> None:
    release(folder, "snow")
    made = list(corrupted_sets(folder, ["frost", "contrast", "snow"], [2, 5]))
    assert [(one.name, one.severity, one.source) for one in made] == [
        ("snow", 2, "released"),
        ("snow", 5, "released"),
        ("frost", 2, "generated, procedural texture"),
        ("frost", 5, "generated, procedural texture"),
        ("contrast", 2, "generated"),
        ("contrast", 5, "generated"),
    ]


def write_textures(folder: Path) -> None:
    rows = np.arange(250, dtype=np.uint8)[:, None, None]
    texture = Image.fromarray(np.ascontiguousarray(np.broadcast_to(rows, (250, 250, 3))))
    for name in FROST_FILES:
        texture.save(folder / name)


def test_frost_takes_the_photographs_that_are_present(folder: Path) -> None:
    write_textures(folder)
    frost = corrupted_images(folder, "frost", 1)
    assert frost.source == "generated"
    test = CIFAR10().load(folder)["test"]
    added = (as_rows(frost.images).astype(float) - as_rows(test))[as_rows(frost.images) < 255]
    assert 0 <= added.min() < added.max() < 0.2 * 250


def test_frost_without_one_photograph_is_procedural(folder: Path) -> None:
    write_textures(folder)
    (folder / FROST_FILES[2]).unlink()
    assert corrupted_images(folder, "frost", 1).source == "generated, procedural texture"


@pytest.mark.parametrize("damage", ["truncated", "small"])
def test_a_damaged_photograph(folder: Path, damage: str) -> None:
    write_textures(folder)
    path = folder / FROST_FILES[1]
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:200])
    else:
        Image.new("RGB", (160, 400)).save(path)
    with pytest.raises(BadInput, match=rf"{path.name} (is not a complete|must be at least 165)"):
        corrupted_images(folder, "frost", 1)


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


@pytest.mark.parametrize("name", ["fog.npy", "labels.npy"])
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
def test_a_damaged_released_file(folder: Path, name: str, how: str) -> None:
    release(folder, "fog")
    damage_file(folder / "CIFAR-10-C" / name, how)
    with pytest.raises(BadInput, match=rf"{name} (is not|must contain).*; delete it and unpack"):
        corrupted_images(folder, "fog", 1)


def test_labels_are_missing_or_no_class(folder: Path) -> None:
    release(folder, "fog")
    labels = folder / "CIFAR-10-C" / "labels.npy"
    np.save(labels, np.full(TOTAL, 10, np.uint8))
    with pytest.raises(BadInput, match=r"labels\.npy contains the label 10; delete it"):
        corrupted_images(folder, "fog", 1)
    labels.unlink()
    with pytest.raises(BadInput, match=r"labels\.npy is missing; unpack CIFAR-10-C\.tar again"):
        corrupted_images(folder, "fog", 1)


@pytest.mark.parametrize(
    ("name", "severity", "message"),
    [("frog", 1, "no corruption is called 'frog'"), ("fog", 0, "severity must be")],
)
def test_bad_requests_fail_before_the_first_set(
    tmp_path: Path, name: str, severity: int, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        next(corrupted_sets(tmp_path, [name], [severity]))
