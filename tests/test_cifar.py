"""CIFAR: equal images from every published format, splits, search folders and errors."""

import hashlib
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from demur.data import CIFAR10, CIFAR100, cifar
from demur.data.cifar import (
    CIFAR10_FILES,
    GET_AGAIN,
    PUBLISHED,
    Cifar,
    Published,
    check_files,
    find,
    locate,
    search_folders,
)
from demur.errors import BadInput
from demur.noise import permutation
from tests.cifar_files import (
    BATCH,
    WRITERS,
    Content,
    contents,
    layout_of,
    small,
    use_small_set,
    write,
)

KINDS: list[type[Cifar]] = [CIFAR10, CIFAR100]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Cifar]:
    """A class that expects small files, which are not written yet."""
    cls: type[Cifar] = request.param
    monkeypatch.setattr(cls, "published", small(cls.published))
    return cls


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch) -> Published:
    """CIFAR-10 with small files, which are not written yet."""
    published = small(CIFAR10_FILES)
    monkeypatch.setattr(CIFAR10, "published", published)
    return published


def digests(data: Cifar, folder: Path) -> dict[str, str]:
    return {name: split.digest()[:8] for name, split in data.load(folder).items()}


def test_every_format_gives_the_same_images(kind: type[Cifar], tmp_path: Path) -> None:
    for layout in kind.published.layouts:
        form = layout.form
        write(kind.published, tmp_path / form, form)
        assert digests(kind(), tmp_path / form) == GOLDEN[kind.__name__], form


def test_pixels_are_channel_first_and_row_major(
    ten: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.zeros((BATCH, 3072), np.uint8)
    pixels[0, 0], pixels[1, 1024], pixels[2, 2048], pixels[3, 31], pixels[4, 32] = 1, 2, 3, 4, 5
    plain = Content(pixels, np.zeros(BATCH, np.uint8))
    for form, writer in WRITERS.items():
        folder = write(ten, tmp_path / form, form)
        layout = layout_of(ten, form)
        file = writer(plain, layout)
        (folder / layout.parts[-1].name).write_bytes(file)
        test = layout.parts[-1]._replace(md5=hashlib.md5(file).hexdigest())
        published = replace(ten, layouts=(replace(layout, parts=(*layout.parts[:-1], test)),))
        monkeypatch.setattr(CIFAR10, "published", published)
        read = CIFAR10().load(tmp_path / form)["test"].pixels
        expected = [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0), (3, 0, 0, 31), (4, 0, 1, 0)]
        assert [int(read[position]) for position in expected] == [1, 2, 3, 4, 5], form
        assert int(read.sum()) == 15


def test_held_out_splits_follow_the_fixed_permutation(kind: type[Cifar], tmp_path: Path) -> None:
    write(kind.published, tmp_path, "python")
    splits, files = kind().load(tmp_path), contents(kind.published)
    pixels, y = np.concatenate([c.pixels for c in files]), np.concatenate([c.y for c in files])
    count = len(y) - BATCH
    sizes = [len(splits[name]) for name in ("fit", "val", "cal", "test")]
    assert sizes == [count - 10, 4, 6, BATCH]
    order = torch.cat([splits[name].index for name in ("fit", "val", "cal")])
    assert torch.equal(order, permutation(0, count, stream=0))
    assert splits["test"].index.tolist() == list(range(count, count + BATCH))
    for split in splits.values():
        assert split.pixels.dtype == torch.uint8
        assert split.levels == 255
        assert np.array_equal(split.pixels.flatten(1), pixels[split.index])
        assert np.array_equal(split.y, y[split.index])


def test_the_paper_split_has_no_val_and_cal_images(kind: type[Cifar], tmp_path: Path) -> None:
    write(kind.published, tmp_path, "python")
    splits = kind(split="paper").load(tmp_path)
    assert list(splits) == ["fit", "test"]
    assert splits["fit"].index.tolist() == list(range(len(splits["fit"])))
    assert splits["test"].digest() == kind().load(tmp_path)["test"].digest()


def test_the_real_split_is_frozen() -> None:
    """Stored runs and records refer to these images, so the order must never change."""
    order = permutation(0, 50_000, stream=0).numpy().astype("<i8").tobytes()
    assert hashlib.sha256(order).hexdigest()[:16] == GOLDEN_ORDER
    for published in PUBLISHED.values():
        assert published.held_out == (45_000, 1_000, 4_000)
        assert published.images == 60_000
        for layout in published.layouts:
            assert sum(part.images for part in layout.parts[:-1]) == 50_000
        assert all(len(part.md5) == 32 for layout in published.layouts for part in layout.parts)


def test_the_real_cifar10_if_present_else_the_error_names_the_download() -> None:
    """Tests the real images if $DEMUR_DATA contains them."""
    folder = Path(os.environ.get("DEMUR_DATA", "no-such-folder"))
    found = find(CIFAR10_FILES, [folder])
    if found is None:
        with pytest.raises(BadInput, match=f"demur data get cifar10 --data {folder}"):
            CIFAR10().load(folder)
        return
    assert check_files(found) == {}
    assert digests(CIFAR10(), folder) == GOLDEN["real CIFAR10"]
    splits = CIFAR10(split="paper").load(folder)
    assert splits["fit"].y.bincount().tolist() == [5000] * 10
    assert splits["test"].y.bincount().tolist() == [1000] * 10
    x = splits["fit"].pixels.float() / 255
    assert x.mean((0, 2, 3)).tolist() == pytest.approx(CIFAR10.domain.mean, abs=1e-4)
    assert x.std((0, 2, 3)).tolist() == pytest.approx(CIFAR10.domain.std, abs=1e-4)


# ---------------------------------------------------------------------------------- search folders


def test_search_order_of_folders(
    ten: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, cache = tmp_path / "named", tmp_path / "cache"
    monkeypatch.setenv("DEMUR_DATA", str(named))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with pytest.raises(BadInput, match="demur data get cifar10") as error:
        CIFAR10().load()
    assert f"CIFAR-10 is not in {named} or {cache / 'demur'}; " in str(error.value)
    assert "--data DIR" in str(error.value)
    in_cache = write(ten, cache / "demur", "python")
    assert locate(ten, None).folder == in_cache
    in_named = write(ten, named, "binary")
    assert locate(ten, None).folder == in_named
    assert locate(ten, in_named).folder == in_named, "the files are in the folder itself"
    with pytest.raises(BadInput, match="elsewhere"):
        locate(ten, tmp_path / "elsewhere")
    (in_named / "test_batch.bin").unlink()
    assert locate(ten, None).folder == in_cache, "a complete data set is preferred to a partial one"


def test_the_cache_folder_follows_the_xdg_standard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEMUR_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert search_folders(None) == [tmp_path / ".cache" / "demur"]

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert search_folders(None) == []
    with pytest.raises(BadInput, match="there is no home"):
        locate(CIFAR10_FILES, None)


# ---------------------------------------------------------------------------------- errors


def load_error(folder: Path, kind: type[Cifar] = CIFAR10) -> str:
    with pytest.raises(BadInput) as error:
        kind().load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_only_the_published_bytes_are_read(kind: type[Cifar], tmp_path: Path) -> None:
    for layout in kind.published.layouts:
        folder = write(kind.published, tmp_path / layout.form, layout.form)
        path = folder / layout.parts[0].name
        content = path.read_bytes()
        changed = content[:900] + bytes([content[900] ^ 1]) + content[901:]
        for damaged in (b"", content[:-1], content + b"!", changed):
            path.write_bytes(damaged)
            md5 = hashlib.md5(damaged).hexdigest()
            expected = f"{path} has the md5 {md5}, not {layout.parts[0].md5}; {GET_AGAIN}"
            assert load_error(tmp_path / layout.form, kind) == expected
        path.write_bytes(content)
        assert digests(kind(), tmp_path / layout.form) == GOLDEN[kind.__name__]
        path.unlink()
        assert load_error(tmp_path / layout.form, kind) == f"{path} is missing; {GET_AGAIN}"


class Call:
    """Pickles as a call that leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.trace}",)


def test_a_malicious_pickle_is_an_error_and_runs_nothing(ten: Published, tmp_path: Path) -> None:
    path, trace = write(ten, tmp_path, "python") / "data_batch_1", tmp_path / "was-here"
    path.write_bytes(pickle.dumps({"data": Call(trace), "labels": [1]}))
    assert "has the md5" in load_error(tmp_path)
    with path.open("rb") as file, pytest.raises(KeyError, match="system"):
        cifar.ArrayUnpickler(file).load()  # as if its md5 were the published one
    assert not trace.exists()


def test_small_data_sets_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in KINDS:
        use_small_set(data, monkeypatch, tmp_path)
        assert check_files(locate(data.published, tmp_path)) == {}


GOLDEN_ORDER = "5915fc477a1fc669"
GOLDEN = {
    "CIFAR10": {"fit": "c084ab71", "val": "018ed5ed", "cal": "859e3a99", "test": "1859f639"},
    "CIFAR100": {"fit": "831a09d6", "val": "defa7072", "cal": "83080973", "test": "3a15c2bd"},
    "real CIFAR10": {"fit": "29024908", "val": "fad8f442", "cal": "5d17ee92", "test": "dcddebc9"},
}
