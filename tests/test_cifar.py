"""CIFAR: equal images from every published format, splits, search folders and errors."""

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demur.data import CIFAR10, CIFAR100, cifar
from demur.data.cifar import Cifar, check_files
from demur.data.cifar_files import (
    CIFAR10_FILES,
    GET_AGAIN,
    PUBLISHED,
    Published,
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
from tests.conftest import Command
from tests.test_cli import expect_error

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
    for form in WRITERS:
        write(kind.published, tmp_path / form, form)
        assert digests(kind(), tmp_path / form) == GOLDEN[kind.__name__], form


def test_pixels_are_channel_first_and_row_major(
    ten: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "check_images", lambda *args: None)  # these are other images
    pixels = np.zeros((BATCH, 3072), np.uint8)
    pixels[0, 0], pixels[1, 1024], pixels[2, 2048], pixels[3, 31], pixels[4, 32] = 1, 2, 3, 4, 5
    plain = Content(pixels, np.zeros(BATCH, np.uint8), np.zeros(BATCH, np.uint8))
    for form, writer in WRITERS.items():
        folder = write(ten, tmp_path / form, form)
        layout = layout_of(ten, form)
        (folder / layout.test.name).write_bytes(writer(plain, layout))
        read = CIFAR10().load(tmp_path / form)["test"].pixels
        expected = [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0), (3, 0, 0, 31), (4, 0, 1, 0)]
        assert [int(read[position]) for position in expected] == [1, 2, 3, 4, 5], form
        assert int(read.sum()) == 15


def test_held_out_splits_follow_the_fixed_permutation(kind: type[Cifar], tmp_path: Path) -> None:
    write(kind.published, tmp_path, "binary")
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
            assert sum(part.images for part in layout.train) == 50_000
        assert all(len(part.md5 or "") == 32 for part in published.archive.layout.parts)


def test_the_real_cifar10_if_present_else_the_error_names_the_download() -> None:
    """Tests the real images if $DEMUR_DATA contains them."""
    folder = Path(os.environ.get("DEMUR_DATA", "no-such-folder"))
    found = find(CIFAR10_FILES, [folder])
    if found is None:
        with pytest.raises(BadInput, match=f"demur data get cifar10 --data {folder}"):
            CIFAR10().load(folder)
        return
    assert check_files(CIFAR10_FILES, found).damaged == {}
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


def test_errors_name_truncated_too_long_and_missing_files(
    kind: type[Cifar], tmp_path: Path
) -> None:
    folder = write(kind.published, tmp_path, "binary")
    path = sorted(folder.iterdir())[-1]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert load_error(tmp_path, kind).startswith(f"{path} is truncated: {len(content) - 1} bytes")
    path.write_bytes(content + b"!")
    assert load_error(tmp_path, kind).startswith(f"{path} is too long")
    path.write_bytes(b"")
    assert load_error(tmp_path, kind).startswith(f"{path} is truncated: 0 bytes")
    path.unlink()
    assert load_error(tmp_path, kind).startswith(f"{path} is missing")


def test_changed_images_are_an_error_in_every_format(ten: Published, tmp_path: Path) -> None:
    for form, writer in WRITERS.items():
        folder = write(ten, tmp_path / form, form)
        layout = layout_of(ten, form)
        position, content = 2, contents(ten)[2]
        pixels, y = content.pixels.copy(), content.y.copy()
        pixels[3, 5] ^= 1
        y[4] = (y[4] + 1) % 10
        path = folder / layout.parts[position].name
        for changed in (content._replace(pixels=pixels), content._replace(y=y)):
            path.write_bytes(writer(changed, layout))
            error = load_error(tmp_path / form)
            assert error.startswith(f"{path} does not contain the images of CIFAR-10: the md5 of ")
            assert error.endswith(f"not {ten.content_md5s[position]}; {GET_AGAIN}")
        path.write_bytes(writer(content, layout))
        assert digests(CIFAR10(), tmp_path / form) == GOLDEN["CIFAR10"]


def test_unverifiable_files_give_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the Python files of CIFAR-100 have a published checksum."""
    monkeypatch.setattr(CIFAR100, "published", small(CIFAR100.published))
    for form in WRITERS:
        folder = write(CIFAR100.published, tmp_path / form, form)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                CIFAR100().load(tmp_path / form)
        messages = [str(warning.message) for warning in caught]
        text = "is not the published file, and its images cannot be verified"
        expected = [f"{folder / name} {text}" for name in ("train", "test")]
        assert messages == (expected if form.startswith("python3") else [])


def test_errors_name_impossible_labels(kind: type[Cifar], tmp_path: Path) -> None:
    classes = kind().domain.classes
    for form, writer in WRITERS.items():
        folder = write(kind.published, tmp_path / form, form)
        layout = layout_of(kind.published, form)
        first = contents(kind.published)[0]
        y = first.y.copy()
        y[7] = classes
        path = folder / layout.parts[0].name
        path.write_bytes(writer(first._replace(y=y), layout))
        message = f"{path} contains the label {classes}, but labels range from 0 to {classes - 1};"
        assert load_error(tmp_path / form, kind).startswith(message)


class Raw:
    """Pickles as an array of objects over raw memory; using that array would crash Python."""

    def __reduce__(self) -> tuple[object, ...]:
        return np.ndarray, ((1,), np.dtype("O"), b"A" * 8)


PIXELS = np.zeros((BATCH, 3072), np.uint8)
LABELS = [1] * BATCH


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "not a batch of images"),
        ({"data": PIXELS}, "integers under 'labels'"),
        ({"data": PIXELS.tolist(), "labels": LABELS}, "bytes under 'data'"),
        ({"data": PIXELS.astype(float), "labels": LABELS}, "numpy.dtype('f8')"),
        ({"data": np.array([None]), "labels": LABELS}, "numpy.dtype('O8')"),
        ({"data": Raw(), "labels": LABELS}, "numpy.dtype('O8')"),
        ({"data": PIXELS, "labels": [1.5] * BATCH}, "integers"),
        ({"data": PIXELS, "labels": ["1"] * BATCH}, "integers"),
        ({"data": PIXELS, "labels": [LABELS] * BATCH}, "integers"),
        ({"data": PIXELS[:-1], "labels": LABELS}, "but contains an array of 19 x 3072 and 20"),
        ({"data": PIXELS, "labels": LABELS[:-1]}, "20 x 3072 and 19"),
        ({"data": PIXELS[:, :-1], "labels": LABELS}, "20 x 3071"),
        ({"data": PIXELS, "labels": [10**30, *LABELS[1:]]}, "integers"),
        ({"data": PIXELS, "labels": [-3, *LABELS[1:]]}, "contains the label -3"),
    ],
)
def test_pickles_with_other_content_are_an_error(
    batch: Any, message: str, ten: Published, tmp_path: Path
) -> None:
    path = write(ten, tmp_path, "python") / "data_batch_4"
    path.write_bytes(pickle.dumps(batch, protocol=2))
    assert load_error(tmp_path).startswith(str(path))
    assert message in load_error(tmp_path)


def test_errors_name_damaged_pickles(ten: Published, tmp_path: Path) -> None:
    path = write(ten, tmp_path, "python") / "data_batch_2"
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:5000], b"\xff" + content[1:], b"(" * 9 + b"."):
        path.write_bytes(damaged)
        assert load_error(tmp_path) == f"{path} is damaged; delete it and {GET_AGAIN}"


class Calls:
    """Pickles as a function call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_malicious_pickle_is_an_error_and_runs_nothing(ten: Published, tmp_path: Path) -> None:
    path = write(ten, tmp_path, "python") / "data_batch_1"
    trace = tmp_path / "was-here"
    for attack in (
        Calls(os.system, f"touch {trace}"),
        Calls(eval, f"open({str(trace)!r}, 'w')"),
        Calls(np.save, str(trace), PIXELS),
        Calls(getattr, "", "join"),
    ):
        for protocol in (0, 2, 4):
            path.write_bytes(pickle.dumps({"data": attack, "labels": LABELS}, protocol=protocol))
            error = load_error(tmp_path)
            assert error.startswith(f"{path} was not loaded and nothing in it was run")
    assert not list(tmp_path.glob("was-here*"))


def test_small_data_sets_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in KINDS:
        use_small_set(data, monkeypatch, tmp_path)
        state = check_files(data.published, locate(data.published, tmp_path))
        assert state.damaged == {}
        assert state.images == data.published.images


def test_a_rewritten_file_with_the_published_images_is_not_damaged(
    ten: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setitem(PUBLISHED, "cifar10", ten)
    folder = write(ten, tmp_path, "python3")
    names = tuple(path.name for path in sorted(folder.iterdir()))
    state = check_files(ten, locate(ten, tmp_path))
    assert (state.damaged, state.rewritten, state.images) == ({}, names, ten.images)
    code, out, _ = command("data", "check", "cifar10", "--data", str(tmp_path))
    assert code == 0
    assert f"all published images are there ({', '.join(names)}: rewritten" in out

    path = folder / names[2]
    batch = pickle.loads(path.read_bytes())
    batch["data"] = batch["data"] ^ 1
    path.write_bytes(pickle.dumps(batch))
    (folder / names[4]).unlink()
    state = check_files(ten, locate(ten, tmp_path))
    assert set(state.damaged) == {names[2], names[4]}
    assert state.damaged[names[4]] == "it is missing"
    assert state.images == ten.images * 4 // 6
    expect_error(
        command("data", "check", "cifar10", "--data", str(tmp_path)),
        "is damaged: data_batch_3 (its md5 is",
    )


GOLDEN_ORDER = "5915fc477a1fc669"
GOLDEN = {
    "CIFAR10": {"fit": "c084ab71", "val": "018ed5ed", "cal": "859e3a99", "test": "1859f639"},
    "CIFAR100": {"fit": "831a09d6", "val": "defa7072", "cal": "83080973", "test": "3a15c2bd"},
    "real CIFAR10": {"fit": "29024908", "val": "fad8f442", "cal": "5d17ee92", "test": "dcddebc9"},
}
