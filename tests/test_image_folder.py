"""A user's own images: layouts, splits, duplicates, damage and the cache."""

import csv
import io
import os
import signal
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from shutil import copy, copytree

import numpy as np
import pytest
from PIL import Image

from demur.data import OwnImages, image_cache
from demur.data.image_splits import SHARES
from demur.errors import BadInput
from demur.files.image_files import resize_pixels
from demur.guards.predictions import find_images
from tests import forked
from tests.own_images import CLASSES, noise_images, write_folder

SIZE = 8


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images in three classes; treat the folder as read-only."""
    return write_folder(tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(path: Path | str, **fields: int | str) -> tuple[OwnImages, list[str]]:
    said: list[str] = []
    return OwnImages(str(path), **{"size": SIZE, **fields}).prepared(on_message=said.append), said  # type: ignore[arg-type]


def rows_of(data: OwnImages) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.listing())))


def test_a_folder_is_divided_by_class_and_recorded(photos: Path) -> None:
    data, said = read(photos)
    assert data.classes == data.class_names == CLASSES
    splits = data.load()
    counts = {name: images.y.bincount().tolist() for name, images in splits.items()}
    assert counts == {"fit": [12] * 3, "val": [2] * 3, "cal": [3] * 3, "test": [3] * 3}
    assert {name: sum(counts[name]) / 60 for name in SHARES} == pytest.approx(SHARES)
    assert said == [f"{photos}: 60 images in 3 classes (cat 20, dog 20, fish 20): "
                    "fit 36, val 6, cal 9, test 9"]  # fmt: skip
    used = [row for row in rows_of(data) if row["split"] == "test"]
    pixels = [np.array(Image.open(photos / row["file"])) for row in used]
    expected = np.stack([resize_pixels(p, SIZE, SIZE).transpose(2, 0, 1) for p in pixels])
    assert np.array_equal(splits["test"].pixels.numpy(), expected)
    assert [CLASSES[label] for label in splits["test"].y] == [row["class"] for row in used]
    index = [i for images in splits.values() for i in images.index.tolist()]
    assert sorted(index) == list(range(60))


def test_names_and_dates_of_files_change_nothing(photos: Path, tmp_path: Path) -> None:
    data, _ = read(photos)
    other = copytree(photos, tmp_path / "other")
    for number, path in enumerate(sorted(other.glob("*/*.png"))):
        path.rename(path.with_name(f"z{97 * number % 61}.png"))
    again, _ = read(other)
    assert again.content == data.content
    assert again.load()["fit"].digest() == data.load()["fit"].digest()


def test_splits_of_the_folder_are_kept_and_no_test_image_is_trained_on(
    photos: Path, tmp_path: Path
) -> None:
    root = tmp_path / "split"
    copytree(photos, root / "train")
    write_folder(root / "test", 12, seed=1)
    leaked = root / "test" / "cat" / "leaked.png"
    copy(photos / "cat" / "0.png", leaked)
    Image.open(photos / "dog" / "1.png").save(root / "train" / "dog" / "twin.bmp")  # other bytes
    copy(photos / "fish" / "2.png", root / "train" / "cat" / "2.png")
    with pytest.raises(
        BadInput, match=r"the same images in two splits: train/cat/0.png and test/cat/"
    ):
        read(root)
    data, said = read(root, duplicates="drop")
    rows = {row["file"]: row for row in rows_of(data)}
    assert rows["test/cat/leaked.png"]["split"] == "test"
    assert rows["train/cat/0.png"]["note"] == "duplicate of test/cat/leaked.png in test"
    assert rows["train/dog/twin.bmp"]["note"] == "duplicate of train/dog/1.png"
    assert "in the classes cat, fish" in rows["train/fish/2.png"]["note"]
    assert any("4 left out: " in sentence for sentence in said)
    splits = data.load()
    assert len(splits["test"]) == 13
    assert {len(splits[name]) for name in ("val", "cal")} == {6, 9}, "taken out of train"


def test_every_layout_of_the_same_images_has_the_same_content(photos: Path, tmp_path: Path) -> None:
    expected, _ = read(photos)
    x, y = noise_images(60, 10)
    npz = tmp_path / "images.npz"
    np.savez_compressed(npz, x=x, y=y, classes=np.array(CLASSES))
    table = tmp_path / "images.csv"
    lines = [f"{path},{path.parent.name}" for path in sorted(photos.glob("*/*.png"))]
    table.write_text("\n".join(["path,label", *lines]), encoding="utf-8")
    for path in (npz, table):
        data, _ = read(path)
        assert data.content == expected.content, path
    assert data.load()["cal"].digest() == expected.load()["cal"].digest()


def test_an_npz_may_have_splits_channels_first_and_floats(tmp_path: Path) -> None:
    x, y = noise_images(36, 10)
    path = tmp_path / "images.npz"
    floats = np.moveaxis(x, 3, 1) / 255
    np.savez(path, x_train=floats, y_train=y, test_images=x[:9], test_labels=y[:9, None])
    data, _ = read(path, duplicates="drop")
    assert data.classes == ("0", "1", "2")
    assert len(data.load()["test"]) == 9
    assert sum(row["note"].endswith(" in test") for row in rows_of(data)) == 9


def test_a_csv_may_have_splits(photos: Path, tmp_path: Path) -> None:
    paths = sorted(photos.glob("*/*.png"))
    words = ["train", "Validation", "cal", "test"]
    lines = [f"{p},{p.parent.name},{words[i % 4]}" for i, p in enumerate(paths)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    splits = read(tmp_path / "list.csv")[0].load()
    assert [len(images) for images in splits.values()] == [15] * 4


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def test_damaged_files_are_listed_and_the_rest_is_used(photos: Path, tmp_path: Path) -> None:
    root = copytree(photos, tmp_path / "photos")
    whole = (root / "cat" / "0.png").read_bytes()
    (root / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    (root / "dog" / "bomb.png").write_bytes(png_header(9_000, 9_000))
    (root / "fish" / "text.jpg").write_text("no image")
    (root / "fish" / "notes.txt").write_text("ignored")
    os.mkfifo(root / "fish" / "pipe.png")
    data, said = read(root)
    assert sum(len(images) for images in data.load().values()) == 59
    notes = {row["file"]: row["note"] for row in rows_of(data) if not row["split"]}
    assert set(notes) == {"cat/0.png", "dog/bomb.png", "fish/text.jpg", "fish/pipe.png"}
    assert "9000 x 9000 pixels" in notes["dog/bomb.png"]
    assert "is a pipe" in notes["fish/pipe.png"]
    assert any("4 cannot be read: cat/0.png (the image is damaged" in line for line in said)
    assert any("1 without the suffix of an image ignored" in line for line in said)


def test_imbalance_and_missing_classes_are_reported(photos: Path, tmp_path: Path) -> None:
    root = copytree(photos, tmp_path / "photos")
    for path in sorted((root / "fish").iterdir())[5:]:
        path.unlink()
    _, said = read(root)
    assert any("cat has 4.0 times the images of fish" in line for line in said)
    copytree(root, tmp_path / "given" / "train")
    write_folder(tmp_path / "given" / "test", 4, names=("cat",), seed=1)
    _, said = read(tmp_path / "given")
    assert any("the test split has no image of dog, fish" in line for line in said)


def test_grey_images_have_one_channel(photos: Path, tmp_path: Path) -> None:
    for path in photos.glob("*/*.png"):
        target = tmp_path / "grey" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).convert("L").save(target)
    data, _ = read(tmp_path / "grey", size=10)
    assert data.domain.shape == (1, 10, 10)
    as_grey, _ = read(photos, size=10, channels=1)
    row = next(row for row in rows_of(as_grey) if row["split"] == "val")
    expected = resize_pixels(np.array(Image.open(photos / row["file"])), 10, 10)
    grey = np.array(Image.fromarray(expected).convert("L"))
    assert np.array_equal(as_grey.load()["val"].pixels[0, 0].numpy(), grey)


def test_images_are_decoded_once_until_they_change(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copytree(photos, tmp_path / "photos")
    data, _ = read(root)
    before = data.load()
    monkeypatch.setattr(image_cache, "_build", lambda *args: pytest.fail("built again"))
    assert read(root)[0].content == data.content
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Image.open(root / "cat" / "0.png").rotate(90, expand=True).save(root / "cat" / "0.png")
    with pytest.raises(BadInput, match="are not those of this recipe"):
        data.load()
    assert read(root)[0].content != data.content
    assert before["fit"].digest() == before["fit"].digest(), "an open split keeps its pixels"


READ = """
import sys
from demur.data import OwnImages
def slow(done, total):
    if len(sys.argv) > 2 and done == 30:
        print("halfway", flush=True)
        import time; time.sleep(60)
print(OwnImages(sys.argv[1], size=8).prepared(slow).content, flush=True)
"""


def test_a_killed_reader_leaves_no_cache_and_two_readers_build_one(
    photos: Path, cache: Path
) -> None:
    command = ["-c", READ, str(photos)]
    killed = forked.popen([*command, "slow"])
    assert killed.stdout.readline() == "halfway\n"
    other = forked.popen(command)  # waits for the lock
    time.sleep(0.2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    said, _ = other.communicate(timeout=60)
    assert said.strip() == read(photos)[0].content
    kept = {
        path.name
        for path in next((cache / "demur" / "images").glob("*/cache.json")).parent.iterdir()
    }
    assert kept == {"cache.json", "data.csv", "pixels.npy", "y.npy"}
    assert not list((cache / "demur" / "images").glob("*.half"))


def folder_of(names: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        for name in names.split():
            write_folder(root / name, 6, names=("",))
        return root

    return make


def npz_of(**arrays: object) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        np.savez(root / "a.npz", **arrays)  # type: ignore[arg-type]
        return root / "a.npz"

    return make


def file_of(name: str, text: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (root / name).write_text(text, encoding="utf-8")
        return root / name

    return make


def empty_class(root: Path) -> Path:
    """A folder with two classes, and one without an image."""
    write_folder(root, 12)
    (root / "zebra").mkdir()
    return root


def npz_that_claims(root: Path) -> Path:
    """An npz whose header claims more numbers than it has."""
    part = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(part, header)
    import zipfile

    with zipfile.ZipFile(root / "a.npz", "w") as file:
        file.writestr("x.npy", part.getvalue())
    return root / "a.npz"


BAD = {
    "all images are in the class 'one'; a classifier needs at least two": folder_of("one"),
    "has no images in folders of classes": lambda root: root,
    "the folder 'zebra' has no image": empty_class,
    "put the folders of the classes into train": folder_of("train/a train/b cat"),
    "cannot be printed; rename it": lambda root: write_folder(root, 12, names=("a", "b\udc80")),
    "needs at least 5; add images": lambda root: write_folder(root, 12),
    "there is no folder or file": lambda root: root / "nothing",
    "is not a set of images": file_of("a.txt", ""),
    "needs the columns path and label": file_of("a.csv", "file,label\nx.png,cat\n"),
    "has no path or no label in line 2": file_of("a.csv", "path,label\n,cat\n"),
    "has the split 'holdout'": file_of("a.csv", "path,label,split\nx.png,cat,holdout\n"),
    "no image can be read": file_of("a.csv", "path,label\nx.png,cat\n"),
    "needs the arrays x and y": npz_of(images=np.zeros(3)),
    "needs images of shape": npz_of(x=np.zeros((3, 4)), y=np.zeros(3, int)),
    "needs uint8 pixels or floats": npz_of(x=np.full((3, 4, 4), 300), y=np.zeros(3, int)),
    "one label per image": npz_of(x=np.zeros((3, 4, 4), np.uint8), y=np.zeros(2, int)),
    "is not an npz of plain arrays": npz_of(x=np.array([{}], dtype=object)),
    "is damaged: it is not an npz": npz_that_claims,
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_layouts_say_what_to_do(message: str, tmp_path: Path) -> None:
    root = tmp_path / "given"
    root.mkdir()
    with pytest.raises(BadInput, match=message):
        read(BAD[message](root))


def test_the_same_images_in_two_classes_are_said(tmp_path: Path) -> None:
    write_folder(tmp_path, 12, names=("a",))
    copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(
        BadInput, match=r"24 files are left out, .* same image is in the classes a, b"
    ):
        read(tmp_path)


def test_a_folder_that_cannot_be_read_is_said(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scandir(path: str | Path) -> object:
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return own(path)

    own = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    for reads in (lambda: read(photos), lambda: find_images([str(photos)])):
        with pytest.raises(BadInput, match="photos/dog: permission denied; change its permissions"):
            reads()
