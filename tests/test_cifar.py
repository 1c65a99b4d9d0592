"""CIFAR: every published form gives the same images; splits, places, refusals."""

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
from demur.data.check import check_files
from demur.data.cifar import Cifar
from demur.data.locations import find, locate, places
from demur.data.published import AGAIN, CIFAR10_FILES, PUBLISHED, Published
from demur.errors import BadInput
from demur.noise import permutation
from tests.cifar_files import BATCH, WRITERS, Content, contents, small, use_small_set, write
from tests.conftest import Command
from tests.test_cli import refused

KINDS: list[type[Cifar]] = [CIFAR10, CIFAR100]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Cifar]:
    """A class that expects small files; none are written yet."""
    found: type[Cifar] = request.param
    monkeypatch.setattr(found, "published", small(found.published))
    return found


@pytest.fixture
def ten(monkeypatch: pytest.MonkeyPatch) -> Published:
    """CIFAR-10 with small files; none are written yet."""
    made = small(CIFAR10_FILES)
    monkeypatch.setattr(CIFAR10, "published", made)
    return made


def digests(data: Cifar, folder: Path) -> dict[str, str]:
    return {name: split.digest()[:8] for name, split in data.load(folder).items()}


def test_every_form_gives_the_same_images(kind: type[Cifar], tmp_path: Path) -> None:
    for form in WRITERS:
        write(kind.published, tmp_path / form, form)
        assert digests(kind(), tmp_path / form) == GOLDEN[kind.__name__], form


def test_red_green_blue_row_by_row(
    ten: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "check_images", lambda *given: None)  # other images, on purpose
    pixels = np.zeros((BATCH, 3072), np.uint8)
    pixels[0, 0], pixels[1, 1024], pixels[2, 2048], pixels[3, 31], pixels[4, 32] = 1, 2, 3, 4, 5
    plain = Content(pixels, np.zeros(BATCH, np.uint8), np.zeros(BATCH, np.uint8))
    for form, writer in WRITERS.items():
        folder = write(ten, tmp_path / form, form)
        (layout,) = (held for held in ten.layouts if form.startswith(held.form))
        (folder / layout.test.name).write_bytes(writer(plain, layout))
        read = CIFAR10().load(tmp_path / form)["test"].pixels
        places_ = [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0), (3, 0, 0, 31), (4, 0, 1, 0)]
        assert [int(read[place]) for place in places_] == [1, 2, 3, 4, 5], form
        assert int(read.sum()) == 15


def test_held_out_splits(kind: type[Cifar], tmp_path: Path) -> None:
    write(kind.published, tmp_path, "binary")
    splits, held = kind().load(tmp_path), contents(kind.published)
    pixels, y = np.concatenate([c.pixels for c in held]), np.concatenate([c.y for c in held])
    count = len(y) - BATCH
    assert [len(splits[name]) for name in ("fit", "val", "cal", "test")] == [
        count - 10,
        4,
        6,
        BATCH,
    ]
    order = torch.cat([splits[name].index for name in ("fit", "val", "cal")])
    assert torch.equal(order, permutation(0, count, stream=0))
    assert splits["test"].index.tolist() == list(range(count, count + BATCH))
    for split in splits.values():
        assert split.pixels.dtype == torch.uint8
        assert split.levels == 255
        assert np.array_equal(split.pixels.flatten(1), pixels[split.index])
        assert np.array_equal(split.y, y[split.index])


def test_the_papers_split_holds_nothing_out(kind: type[Cifar], tmp_path: Path) -> None:
    write(kind.published, tmp_path, "python")
    splits = kind(split="paper").load(tmp_path)
    assert list(splits) == ["fit", "test"]
    assert splits["fit"].index.tolist() == list(range(len(splits["fit"])))
    assert splits["test"].digest() == kind().load(tmp_path)["test"].digest()


def test_the_real_split_is_frozen() -> None:
    """Old runs and records were made with these images; the order may never change."""
    order = permutation(0, 50_000, stream=0).numpy().astype("<i8").tobytes()
    assert hashlib.sha256(order).hexdigest()[:16] == GOLDEN_ORDER
    for published in PUBLISHED.values():
        assert published.held_out == (45_000, 1_000, 4_000)
        assert published.images == 60_000
        for layout in published.layouts:
            assert sum(part.images for part in layout.train) == 50_000
        assert all(len(part.md5 or "") == 32 for part in published.archive.layout.parts)


def test_the_real_cifar10_or_where_to_get_it() -> None:
    """With $DEMUR_DATA set to a folder that has it, the real images; else the way to them."""
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


# ---------------------------------------------------------------------------------- places


def test_places_looked_in(ten: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert locate(ten, in_named).folder == in_named, "the files lie in the folder itself"
    with pytest.raises(BadInput, match="mask_label"):
        locate(ten, tmp_path / "mask_label")
    (in_named / "test_batch.bin").unlink()
    assert locate(ten, None).folder == in_cache, "a whole set goes before a partial one"


def test_the_cache_follows_the_standard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEMUR_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert places(None) == [tmp_path / ".cache" / "demur"]

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert places(None) == []
    with pytest.raises(BadInput, match="there is no home"):
        locate(CIFAR10_FILES, None)


# ---------------------------------------------------------------------------------- refusals


def refusal(folder: Path, kind: type[Cifar] = CIFAR10) -> str:
    with pytest.raises(BadInput) as error:
        kind().load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_cut_long_and_missing_files_are_named(kind: type[Cifar], tmp_path: Path) -> None:
    folder = write(kind.published, tmp_path, "binary")
    path = sorted(folder.iterdir())[-1]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert refusal(tmp_path, kind).startswith(f"{path} is cut short: {len(content) - 1} bytes")
    path.write_bytes(content + b"!")
    assert refusal(tmp_path, kind).startswith(f"{path} is too long")
    path.write_bytes(b"")
    assert refusal(tmp_path, kind).startswith(f"{path} is cut short: 0 bytes")
    path.unlink()
    assert refusal(tmp_path, kind).startswith(f"{path} is missing")


def test_changed_images_are_refused_in_every_form(ten: Published, tmp_path: Path) -> None:
    for form, writer in WRITERS.items():
        folder = write(ten, tmp_path / form, form)
        (layout,) = (held for held in ten.layouts if form.startswith(held.form))
        place, content = 2, contents(ten)[2]
        pixels, y = content.pixels.copy(), content.y.copy()
        pixels[3, 5] ^= 1
        y[4] = (y[4] + 1) % 10
        path = folder / layout.parts[place].name
        for changed in (content._replace(pixels=pixels), content._replace(y=y)):
            path.write_bytes(writer(changed, layout))
            said = refusal(tmp_path / form)
            assert said.startswith(f"{path} does not hold the images of CIFAR-10: the md5 of its ")
            assert said.endswith(f"not {ten.contents[place]}; {AGAIN}")
        path.write_bytes(writer(content, layout))
        assert digests(CIFAR10(), tmp_path / form) == GOLDEN["CIFAR10"]


def test_where_no_checksum_of_the_images_is_known_other_files_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of CIFAR-100 only the Python files have a checksum, and they may have been written again."""
    monkeypatch.setattr(CIFAR100, "published", small(CIFAR100.published))
    for form in WRITERS:
        folder = write(CIFAR100.published, tmp_path / form, form)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                CIFAR100().load(tmp_path / form)
        said = [str(each.message) for each in caught]
        told = "is not the published file, and nothing says whether its images are"
        again = [f"{folder / name} {told}" for name in ("train", "test")]
        assert said == (again if form.startswith("python3") else [])


def test_impossible_labels_are_named(kind: type[Cifar], tmp_path: Path) -> None:
    classes = kind.domain.classes
    for form, writer in WRITERS.items():
        folder = write(kind.published, tmp_path / form, form)
        (layout,) = (held for held in kind.published.layouts if form.startswith(held.form))
        first = contents(kind.published)[0]
        y = first.y.copy()
        y[7] = classes
        path = folder / layout.parts[0].name
        path.write_bytes(writer(first._replace(y=y), layout))
        words = f"{path} holds the label {classes}, but classes run from 0 to {classes - 1}"
        assert refusal(tmp_path / form, kind) == words


class Raw:
    """Pickled as an array of objects over raw memory, which would crash whoever touches it."""

    def __reduce__(self) -> tuple[object, ...]:
        return np.ndarray, ((1,), np.dtype("O"), b"A" * 8)


PIXELS = np.zeros((BATCH, 3072), np.uint8)
LABELS = [1] * BATCH


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([1, 2], "no batch of images"),
        ({"data": PIXELS}, "whole numbers under 'labels'"),
        ({"data": PIXELS.tolist(), "labels": LABELS}, "bytes under 'data'"),
        ({"data": PIXELS.astype(float), "labels": LABELS}, "numpy.dtype('f8')"),
        ({"data": np.array([None]), "labels": LABELS}, "numpy.dtype('O8')"),
        ({"data": Raw(), "labels": LABELS}, "numpy.dtype('O8')"),
        ({"data": PIXELS, "labels": [1.5] * BATCH}, "whole numbers"),
        ({"data": PIXELS, "labels": ["1"] * BATCH}, "whole numbers"),
        ({"data": PIXELS, "labels": [LABELS] * BATCH}, "whole numbers"),
        ({"data": PIXELS[:-1], "labels": LABELS}, "but holds an array of 19 x 3072 and 20"),
        ({"data": PIXELS, "labels": LABELS[:-1]}, "20 x 3072 and 19"),
        ({"data": PIXELS[:, :-1], "labels": LABELS}, "20 x 3071"),
        ({"data": PIXELS, "labels": [10**30, *LABELS[1:]]}, "whole numbers"),
        ({"data": PIXELS, "labels": [-3, *LABELS[1:]]}, "holds the label -3"),
    ],
)
def test_other_pickles_are_refused(held: Any, words: str, ten: Published, tmp_path: Path) -> None:
    path = write(ten, tmp_path, "python") / "data_batch_4"
    path.write_bytes(pickle.dumps(held, protocol=2))
    assert refusal(tmp_path).startswith(str(path))
    assert words in refusal(tmp_path)


def test_damaged_pickles_are_named(ten: Published, tmp_path: Path) -> None:
    path = write(ten, tmp_path, "python") / "data_batch_2"
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:5000], b"\xff" + content[1:], b"(" * 9 + b"."):
        path.write_bytes(damaged)
        assert refusal(tmp_path) == f"{path} is damaged; delete it and {AGAIN}"


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_malicious_pickle_is_refused_and_runs_nothing(ten: Published, tmp_path: Path) -> None:
    path = write(ten, tmp_path, "python") / "data_batch_1"
    trace = tmp_path / "was-here"
    for harm in (
        Calls(os.system, f"touch {trace}"),
        Calls(eval, f"open({str(trace)!r}, 'w')"),
        Calls(np.save, str(trace), PIXELS),
        Calls(getattr, "", "join"),
    ):
        for protocol in (0, 2, 4):
            path.write_bytes(pickle.dumps({"data": harm, "labels": LABELS}, protocol=protocol))
            assert refusal(tmp_path).startswith(f"{path} is refused and nothing in it was run")
    assert not list(tmp_path.glob("was-here*"))


def test_small_sets_pass_their_own_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in KINDS:
        use_small_set(data, monkeypatch, tmp_path)
        state = check_files(data.published, locate(data.published, tmp_path))
        assert state.damaged == {}
        assert state.images == data.published.images


def test_a_file_that_was_written_anew_is_no_damage_as_long_as_its_images_are_there(
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
    held = pickle.loads(path.read_bytes())
    held["data"] = held["data"] ^ 1
    path.write_bytes(pickle.dumps(held))
    (folder / names[4]).unlink()
    state = check_files(ten, locate(ten, tmp_path))
    assert set(state.damaged) == {names[2], names[4]}
    assert state.damaged[names[4]] == "it is missing"
    assert state.images == ten.images * 4 // 6
    refused(
        command("data", "check", "cifar10", "--data", str(tmp_path)),
        "is damaged: data_batch_3 (its md5 is",
    )


GOLDEN_ORDER = "5915fc477a1fc669"
GOLDEN: dict[str, dict[str, str]] = {
    "CIFAR10": {
        "fit": "c084ab71",
        "val": "018ed5ed",
        "cal": "859e3a99",
        "test": "1859f639",
    },
    "CIFAR100": {
        "fit": "831a09d6",
        "val": "defa7072",
        "cal": "83080973",
        "test": "3a15c2bd",
    },
    "real CIFAR10": {
        "fit": "29024908",
        "val": "fad8f442",
        "cal": "5d17ee92",
        "test": "dcddebc9",
    },
}
