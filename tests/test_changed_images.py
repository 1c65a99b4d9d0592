"""Other images or labels under the same name are refused by every command that reads them."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demur.data import OwnImages, image_cache, image_splits, sources
from demur.data.cifar import cache_folder
from demur.data.image_cache import DIGESTS, FILES
from demur.data.image_splits import similar_pairs
from demur.errors import BadInput
from demur.files.checked_files import read_json, write_json
from demur.recipes import recipe
from demur.runs import Run
from demur.spec import digest, show
from tests.conftest import Command
from tests.own_images import CLASSES, noise_images, write_folder

BRIEF = ["epochs=1", "width=4", "attack.steps=1", "validation_attack.steps=1"]
COMMANDS = [
    "attack own pgd-10 --n 3", "attack own clean --n 2", "score own", "calibrate own --risk 0.5",
    "export own -o guard", "report own -o page.html", "export own --archive -o copy",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, their cache, and a run with a clean record; copied by `there`."""
    root = tmp_path_factory.mktemp("trained")
    write_folder(root / "photos")
    return root


@pytest.fixture
def there(
    trained: Path, in_empty_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The same paths for all tests, since a cache belongs to a path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(trained / "cache"))
    monkeypatch.chdir(trained)
    if not Path("runs/own").exists():
        words = ["data=photos", "size=8", *BRIEF, "--out", "runs/own"]
        assert command("train", "images-pgdat-rr-small", *words)[0] == 0
        assert command("attack", "own", "clean")[0] == 0
        assert command("score", "own")[0] == 0  # makes the records that thresholds need
    return trained


def cached() -> Path:
    """The folder of the only cache."""
    (folder,) = (path.parent for path in cache_folder().glob("images/*/y.npy"))
    return folder


def rewrite(name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change an array of the cache and compute its digests again."""
    folder = cached()
    array = np.load(folder / name)
    np.save(folder / name, change(array.copy()))
    metadata = read_json(folder / "cache.json", "")
    write_json(folder / "cache.json", metadata | {"files": image_cache._file_digests(folder)})


def swap(array: np.ndarray) -> np.ndarray:
    """Exchange the rows of cal and test, nine each, at the end."""
    return np.concatenate([array[:-18], array[-9:], array[-18:-9]])


def swap_splits() -> None:
    rewrite("pixels.npy", swap)
    rewrite("y.npy", swap)


def replace_source() -> None:
    """Another image under the same name and with the same time of change."""
    path = Path("photos/cat/0.png")
    before = path.stat()
    Image.fromarray(255 - np.array(Image.open(path))).save(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "labels": lambda: rewrite("y.npy", lambda y: (y + 1) % 3),
    "pixels": lambda: rewrite("pixels.npy", lambda x: 255 - x),
    "one test label": lambda: rewrite("y.npy", lambda y: np.append(y[:-1], (y[-1] + 1) % 3)),
    "one pixel of each image": lambda: rewrite("pixels.npy", lambda x: x ^ (np.arange(8) == 0)),
    "splits": swap_splits,
    "source": replace_source,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_are_refused(change: str, there: Path, command: Command) -> None:
    copytree("runs", "runs-before")
    copytree("cache", "cache-before")
    source = Path("photos/cat/0.png").read_bytes()
    try:
        CHANGES[change]()
        for line in COMMANDS:
            if change == "one test label" and line.split()[0] in ("calibrate", "export"):
                continue  # these read no test image
            code, out, err = command(*line.split())
            assert code == 2, f"{line}: {out}{err}"
            assert "not those" in err and err.strip().count("\n") == 0, err
        assert not any(Path(name).exists() for name in ("guard", "page.html", "copy"))
    finally:
        if change == "source":
            Path("photos/cat/0.png").write_bytes(source)
        for name in ("runs", "cache"):
            rmtree(name)
            Path(f"{name}-before").rename(name)


def test_the_same_data_are_read_again(there: Path, command: Command) -> None:
    for line in (
        "attack own clean --verify",
        "score own --verify",
        "calibrate own --tpr 0.3 --verify",
    ):
        code, out, err = command(*line.split())
        assert code == 0, f"{line}: {out}{err}"


@pytest.mark.parametrize("line", ["score own", "report own -o page.html", "export own -o guard"])
def test_verify_hashes_the_images_first(
    line: str, there: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(self: OwnImages, folder: Path | None = None) -> None:
        raise BadInput("hashed")

    monkeypatch.setattr(OwnImages, "verify", verify)
    assert command(*line.split(), "--verify")[0::2] == (2, "demur: hashed\n")


# ---------------------------------------------------------------------------- cache


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(image_cache, "SETTLED", 0)  # files are hashed once, even new ones
    return write_folder(tmp_path / "photos", 18)


def test_files_are_hashed_once_until_they_change(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = OwnImages(str(photos), size=8).prepared()
    data.load()
    file_digest, hashed = hashlib.file_digest, list[str]()

    def counted(file: Any, kind: str) -> Any:
        hashed.append(kind)
        return file_digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    data.load()
    assert not hashed
    data.verify()
    assert len(hashed) == len(FILES)
    (cached() / "y.npy").touch()
    data.load()
    assert len(hashed) == 2 * len(FILES)


def test_a_split_that_was_opened_before_a_change_has_its_own_digest(photos: Path) -> None:
    data = OwnImages(str(photos), size=8).prepared()
    before = data.load()["test"]
    expected = before.digest()
    rewrite("y.npy", lambda y: (y + 1) % 3)
    assert before.digest() == expected, "labels are in memory"
    assert data.load()["test"].digest() != expected


def test_a_new_file_is_hashed_again(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change within the resolution of a file system's clock would not be seen."""
    monkeypatch.setattr(image_cache, "SETTLED", 10**12)
    OwnImages(str(photos), size=8).load()
    assert not (cached() / DIGESTS).exists()


def test_verify_finds_what_times_do_not_show(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "file_stamp", lambda path: "always the same")
    data = OwnImages(str(photos), size=8).prepared()
    path = photos / "cat" / "0.png"
    Image.fromarray(255 - np.array(Image.open(path))).save(path)
    data.load()
    data.verify()
    with pytest.raises(BadInput, match="are not those of this recipe"):
        data.load()


DAMAGE = {
    "y.npy": [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04",
        b"\x93NUMPY\x01\x00\x76\x00{'descr': 'O'}",
        b"text",
    ],
    "pixels.npy": [
        b"",
        b"\x93NUMPY\x03\x00\xff\xff\xff\x00{",
        b"\x93NUMPY\x01\x00\x03\x00(((",
        b"\x80\x04.",
    ],
    "data.csv": [b"\xff\xfe\x00", b""],
    "cache.json": [b"", b"{", b"[]", b"null", b"\xff", b'{"metadata_digest": 3}', b'{"stamp": "'],
    DIGESTS: [b"", b"{", b"[]", b"\xff\xfe"],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_cache_is_built_again_without_a_traceback(name: str, photos: Path) -> None:
    data = OwnImages(str(photos), size=8).prepared()
    expected = {split: images.digest() for split, images in data.load().items()}
    for content in DAMAGE[name]:
        for repaired in (False, True):
            (cached() / name).write_bytes(content)
            if repaired and name in FILES:
                metadata = read_json(cached() / "cache.json", "")
                repaired_files = {"files": image_cache._file_digests(cached())}
                write_json(cached() / "cache.json", metadata | repaired_files)
            found = {split: images.digest() for split, images in data.load().items()}
            assert found == expected or (name, content) == ("data.csv", b"")


@pytest.mark.parametrize(
    "key", ["stamp", "content", "classes", "channels", "size", "counts", "report", "leaks", "files"]
)
def test_a_cache_with_odd_metadata_is_built_again(key: str, photos: Path) -> None:
    data = OwnImages(str(photos), size=8).prepared()
    for change in ({}, {key: None}, {key: 7}, {key: {"fit": -1}}):
        metadata = read_json(cached() / "cache.json", "")
        left = {name: value for name, value in metadata.items() if name != key}
        write_json(cached() / "cache.json", left | change)
        assert OwnImages(str(photos), size=8).prepared() == data
        assert read_json(cached() / "cache.json", "")[key] == metadata[key]


def test_a_damaged_npz_is_one_sentence(tmp_path: Path, photos: Path) -> None:
    x, y = noise_images(30, 10)
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=x, y=y)
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for position in generator.integers(0, len(content), 3):
            damaged[position] = generator.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            OwnImages(str(path), size=8).prepared()
        except BadInput as error:
            assert "\n" not in str(error)


# ---------------------------------------------------------------------------- leakage


def test_images_that_are_equal_after_resizing_are_duplicates(photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "divided"
    copytree(photos, root / "train")
    write_folder(root / "test", 12, seed=1)
    for path, side in (("train/cat/small.png", 8), ("test/cat/large.png", 20)):
        Image.new("RGB", (side, side), (200, 30, 30)).save(root / path)
    said: list[str] = []
    with pytest.raises(BadInput, match=r"train/cat/small.png and test/cat/large.png; remove them"):
        OwnImages(str(root), size=8).prepared(on_message=said.append)
    dropped = OwnImages(str(root), size=8, duplicates="drop").prepared()
    kept = OwnImages(str(root), size=8, duplicates="keep").prepared(on_message=said.append)
    assert any("the same images in two splits: train/cat/small.png" in line for line in said)
    counts = [sum(map(len, data.load().values())) for data in (dropped, kept)]
    assert counts == [31, 32]
    assert dropped.content != kept.content
    assert 'duplicates="keep"' in show(replace(recipe("images-pgdat-rr"), data=kept))


def test_a_recipe_says_that_duplicates_are_kept(photos: Path) -> None:
    made = recipe("images-pgdat-rr-small", [f"data={photos}", "duplicates=keep", "size=8"])
    assert made.data == OwnImages(str(photos), size=8, duplicates="keep", eps=2 / 255)
    plain = OwnImages(str(photos), size=8)
    assert digest(plain) == digest(replace(plain, duplicates="refuse"))


def test_results_of_kept_duplicates_say_so(there: Path, command: Command) -> None:
    words = ["data=photos", "size=8", "duplicates=keep", *BRIEF, "--out", "runs/keep"]
    assert command("train", "images-pgdat-rr-small", *words)[0] == 0
    code, _, err = command("attack", "keep", "clean")
    assert code == 0 and "test images may be trained on" in err
    (record,) = Run.open("keep").records("test")
    assert 'duplicates="keep"' in record.metadata["recipe"]
    rmtree("runs/keep")
    rmtree("cache")


def test_copies_in_other_files_look_alike(photos: Path, tmp_path: Path) -> None:
    smooth = smooth_images(40)
    root = tmp_path / "alike"
    for number, pixels in enumerate(smooth):
        path = root / ("train" if number < 30 else "test") / CLASSES[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    Image.fromarray(smooth[0]).save(root / "test" / "cat" / "copy.jpg", quality=75)
    brighter = np.clip(smooth[1] * 1.1, 0, 255).astype(np.uint8)
    Image.fromarray(brighter).save(root / "train" / "cat" / "other.webp", quality=90)
    said: list[str] = []
    data = OwnImages(str(root), size=32).prepared(on_message=said.append)
    (line,) = [line for line in said if "look alike" in line]
    assert "train/cat/0.png and test/cat/copy.jpg" in line
    assert "train/dog/1.png" in line and "train/cat/other.webp" in line, "two classes"
    assert "looks like test/cat/copy.jpg" in data.listing()


def smooth_images(count: int, side: int = 32) -> np.ndarray:
    """Random blurred images N, H, W, 3."""
    small = np.random.default_rng(0).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    return np.stack([np.array(Image.fromarray(one).resize((side, side))) for one in small])


def test_similar_pairs_are_those_of_a_double_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_splits, "BLOCK", 64)
    pixels = smooth_images(150).transpose(0, 3, 1, 2)
    noisy = np.clip(pixels[:50] + np.random.default_rng(1).normal(0, 2, pixels[:50].shape), 0, 255)
    both = np.concatenate([pixels, noisy.astype(np.uint8), np.zeros_like(pixels[:3])])
    bits, grey = image_splits._hashes(both)
    groups = np.arange(len(both)) % 7
    expected = [
        (i, j)
        for i in range(len(both))
        for j in range(i + 1, len(both))
        if groups[i] != groups[j]
        and (bits[i] != bits[j]).sum() <= bits.shape[1] / 12
        and grey[i] @ grey[j] >= 0.98
    ]
    assert similar_pairs(both, groups) == expected
    assert {(i, i + 150) for i in range(50)} <= set(expected), "copies with noise"
    assert not any(j >= 200 for _, j in expected), "black images look like nothing"


def test_images_that_all_look_alike_take_no_memory() -> None:
    one = smooth_images(1).transpose(0, 3, 1, 2)
    assert len(similar_pairs(np.repeat(one, 3000, axis=0), np.arange(3000))) == 10_000
    assert similar_pairs(one, np.zeros(1, np.int64)) == []


@pytest.mark.skipif(not os.environ.get("DEMUR_EXHAUSTIVE"), reason="long: make exhaustive")
def test_ten_thousand_images_are_compared_in_two_seconds() -> None:
    many = np.random.default_rng(2).integers(0, 256, (10_000, 3, 32, 32), dtype=np.uint8)
    begin = time.process_time()
    assert similar_pairs(many, np.arange(10_000)) == []
    assert time.process_time() - begin < 2
