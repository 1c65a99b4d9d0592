"""Data sets of other libraries: of torch, with Pillow images, of Hugging Face; odd samples."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur import AcceptedError, BadInput, Con, OwnImages, RejectAutoAttack, recipe
from demur.audits.image_parts import audit_images, image_parts
from demur.data.sources import class_names, label_of_sample, open_source, pixels_of_sample
from demur.spec.importing import allow_import

MODULE = """
import numpy as np
import torch
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 12, 12, 3), dtype=np.uint8)


class Photos(torch.utils.data.Dataset):
    classes = ["zebra", "ant"]

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, i):
        return Image.fromarray(PIXELS[i]), i % 2


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i, pixels in enumerate(PIXELS):
            yield {"img": torch.tensor(pixels).permute(2, 0, 1) / 255, "target": "ab"[i % 2]}


class Broken(Photos):
    def __getitem__(self, i):
        return PIXELS[i], {}[i]


class Empty(Photos):
    def __len__(self):
        return 0


def splits():
    return {"train": Photos(), "test": torch.utils.data.Subset(Photos(), range(4))}


def number():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("PIL")
    name = f"owndata_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DEMUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield name
    sys.modules.pop(name, None)


def named(text: str) -> str:
    allow_import(text)
    return text


# ------------------------------------------------ as the data of a recipe


def test_a_data_set_of_the_users_is_the_data_of_a_recipe(module: str) -> None:
    changes = [f"data={module}:Photos", "size=8"]
    found = recipe("images-standard-small", changes).data.prepared()
    assert isinstance(found, OwnImages)
    assert found.class_names == ("ant", "zebra")
    splits = found.load()
    assert sum(map(len, splits.values())) == 24
    again = recipe("images-standard-small", changes).data.prepared()
    assert again == found  # the same content


@pytest.mark.parametrize(
    ("name", "classes"), [("Photos", {"ant", "zebra"}), ("Stream", {"a", "b"})]
)
def test_pillow_images_streams_and_mappings_are_the_same_pixels(
    module: str, name: str, classes: set[str]
) -> None:
    source = open_source(named(f"{module}:{name}"))
    assert {entry.label for entry in source.entries} == classes
    pixels = source.decode(5, source.content(5))
    assert np.array_equal(pixels, sys.modules[module].PIXELS[5])


def test_splits_are_those_of_the_mapping(module: str) -> None:
    source = open_source(named(f"{module}:splits"))
    assert [entry.split for entry in source.entries] == ["fit"] * 24 + ["test"] * 4
    assert source.entries[-1].name == "test[3]"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Broken", r"sample 0 of the data set \w+:Broken fails at .*\.py:27 \(KeyError: 0\)"),
        ("Empty", r"the data set \w+:Empty is empty"),
        ("number", r"\w+:number is no torch Dataset but int"),
        ("Photo", "did you mean Photos"),
    ],
)
def test_a_faulty_data_set_is_named_with_its_line(module: str, name: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        open_source(named(f"{module}:{name}"))


def test_a_file_may_not_name_a_data_set(module: str) -> None:
    with pytest.raises(BadInput, match="is code and is not imported for a file"):
        OwnImages(f"{module}:Photos").load()


# ------------------------------------------------ as the data of an audit or of evaluate


def test_an_audit_numbers_the_classes_as_the_data_set_does(module: str) -> None:
    (x, y), cal = audit_images(f"{module}:Photos", 6)
    assert x.shape == (6, 3, 12, 12) and x.dtype == np.uint8
    assert y.tolist() == [0, 0, 0, 0, 0, 0] and cal is None  # every fourth image: zebras


class Large(torch.utils.data.Dataset[Any]):
    """Images of 224 pixels, as a mapping with a one-hot label."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> dict[str, Any]:
        image = torch.full((3, 224, 224), i / 3)
        return {"pixel_values": image, "labels": torch.eye(2)[i % 2]}


class Words(Large):
    classes = ("cat", "dog")

    def __getitem__(self, i: int) -> Any:
        return np.full((8, 8), 40 * i, np.uint8), ("cat", "dog", "eel")[i]


def test_evaluate_takes_a_data_set() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(56), nn.Flatten(), nn.Linear(48, 2)).eval()
    attack = RejectAutoAttack(
        net, AcceptedError(Con(), 0.2), verbose=False, attacks_to_run=["product"]
    )
    result = attack.evaluate(Large(), sanity=False)
    assert result.y.tolist() == [0, 1, 0]
    assert result.x_adv.shape == (3, 3, 224, 224)


def test_words_are_classes_only_where_the_data_set_names_them() -> None:
    two = torch.utils.data.Subset(Words(), range(2))
    with pytest.raises(BadInput, match="sample 0 of the data set Subset: its label is 'cat'"):
        list(image_parts(two))
    with pytest.raises(BadInput, match="sample 2 of the data set Words: its label is 'eel'"):
        list(image_parts(Words()))
    ((x, y),) = image_parts(_first(Words(), 2))
    assert (x.shape, y.tolist()) == ((2, 1, 8, 8), [0, 1])
    assert float(x[1].max()) == pytest.approx(40 / 255)


def _first(dataset: Any, count: int) -> Any:
    return type("Few", (type(dataset),), {"__len__": lambda self: count})()


class Normalised(Large):
    def __getitem__(self, i: int) -> Any:
        return torch.full((3, 8, 8), i - 1.5), i


class Sizes(Large):
    def __getitem__(self, i: int) -> Any:
        return torch.zeros(3, 8 + i, 8), 0


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (Normalised(), "sample 0 of the data set Normalised: pixels must lie in"),
        (Sizes(), "several shapes"),
        (_first(Large(), 0), "the data set Few is empty"),
        ([], "there are no images"),
    ],
)
def test_unfit_samples_are_named(dataset: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        list(image_parts(dataset))


@pytest.mark.parametrize(
    ("label", "expected"),
    [(3, 3), (np.int64(3), 3), (torch.tensor(3), 3), ([0, 1], 1), (torch.eye(4)[2], 2), ("b", "b")],
)  # fmt: skip
def test_labels(label: Any, expected: int | str) -> None:
    assert label_of_sample(label) == expected


@pytest.mark.parametrize("label", [1.5, None, [0.5, 0.5], [1, 1, 0], torch.zeros(2, 2)])
def test_unfit_labels_are_refused(label: Any) -> None:
    with pytest.raises(BadInput, match="its label is"):
        label_of_sample(label)


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (8, 8, 1), (3, 8, 8), (8, 8, 3)])
def test_images_of_every_layout(shape: tuple[int, ...]) -> None:
    image: Tensor = torch.randint(0, 256, shape).to(torch.uint8)
    found = pixels_of_sample(image)
    assert found.shape == (8, 8, 3 if 3 in shape else 1)
    assert np.array_equal(pixels_of_sample(image / 255), found)


def test_a_table_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    names = ["zebra", "ant"]
    features = datasets.Features(
        {"image": datasets.Array3D((8, 8, 3), "uint8"), "label": datasets.ClassLabel(names=names)}
    )
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    rows = {"image": pixels.tolist(), "label": [0, 1, 1, 0]}
    table = datasets.Dataset.from_dict(rows, features=features)
    assert class_names(table) == ("zebra", "ant")
    ((x, y),) = image_parts(table.with_format("numpy"))
    assert y.tolist() == [0, 1, 1, 0]
    assert np.array_equal((255 * x).round().numpy().astype(np.uint8), pixels.transpose(0, 3, 1, 2))
