"""Training on a user's own images: recipes, streaming, class names, logs and nets."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur.data import CIFAR10, CropFlip, MappedImages, OwnImages, image_cache, own_images
from demur.data.cifar import cache_folder
from demur.errors import BadInput
from demur.files.checked_files import content_digest, read_json, write_json
from demur.images import Domain
from demur.methods import RR
from demur.nets import FactoryNet, ResNet18
from demur.recipes import Recipe, recipe
from demur.runs import Run
from demur.spec import importing
from demur.training import FastSteps, PlainSteps, TrainState, train
from tests.conftest import Command
from tests.own_images import CLASSES, write_folder

BRIEF = [
    "epochs=2", "epoch_images=36", "net=ResNet8(4)", "attack.steps=1", "validation_attack.steps=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def of(photos: Path, *changes: str) -> Recipe:
    return recipe("images-pgdat-rr-small", [f"data={photos}", "size=8", *BRIEF, *changes])


def test_data_names_a_path_or_a_data_set(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of(photos).data == OwnImages(str(photos), size=8, eps=2 / 255)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CIFAR10").mkdir()
    for text in ("CIFAR10", "cifar10", "CIFAR10()"):
        assert recipe("images-pgdat-rr", [f"data={text}"]).data == CIFAR10()
    assert recipe("images-pgdat-rr", ["data=./CIFAR10"]).data == OwnImages("./CIFAR10")
    with pytest.raises(BadInput, match="no such folder or file exists; give a folder"):
        recipe("images-pgdat-rr", ["data=photo"])
    with pytest.raises(BadInput, match="name them with data=PATH"):
        train(recipe("images-pgdat-rr-small"), tmp_path / "run")


def test_a_streamed_set_trains_to_the_same_bits_as_a_resident_one(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(of(photos, "batch_size=14"), augment=CropFlip(1))  # batches of 14, 14 and 8
    resident = train(made, tmp_path / "resident")
    monkeypatch.setattr(own_images, "RESIDENT_LIMIT", 0)
    assert isinstance(made.data.load()["fit"].to(torch.device("cpu")), MappedImages)
    streamed = train(made, tmp_path / "streamed")
    files = [(run.path / "model.safetensors").read_bytes() for run in (resident, streamed)]
    assert files[0] == files[1]
    data = [run.checkpoint["fit_data"] for run in (resident, streamed)]
    assert data[0] == data[1]


def test_fast_steps_on_a_stream_end_with_the_weights_of_plain_ones(photos: Path) -> None:
    made = replace(of(photos, "batch_size=14", "precision=fp64"), augment=CropFlip(1))
    made = replace(made, data=made.data.prepared())
    fit = made.data.load()["fit"]
    assert isinstance(fit, MappedImages)
    cpu, weights = torch.device("cpu"), []
    for images, kind in ((fit.to(cpu), PlainSteps), (fit, FastSteps)):
        state = TrainState(made, cpu)
        extra = {"compiler": "none"} if kind is FastSteps else {}
        steps = kind(made, state, images, **extra)
        steps.begin(0)
        for i in range(steps.batches):
            steps(i)
        weights.append(torch.cat([p.detach().flatten() for p in state.net.parameters()]))
    assert torch.allclose(weights[0], weights[1], atol=1e-10)


def changed_labels(photos: Path, repair: bool) -> None:
    """Rotate the labels in the cache of the photos; `repair` its digests too."""
    (folder,) = (path.parent for path in cache_folder().glob("images/*/y.npy"))
    y = np.load(folder / "y.npy")
    np.save(folder / "y.npy", (y + 1) % 3)
    if repair:
        metadata = read_json(folder / "cache.json", "")
        write_json(folder / "cache.json", metadata | {"files": image_cache._file_digests(folder)})


def test_changed_labels_in_the_cache_are_never_believed(command: Command, photos: Path) -> None:
    words = [f"data={photos}", "size=8", *BRIEF, "--out", "runs/own"]
    assert command("train", "images-pgdat-rr-small", *words)[0] == 0
    assert command("attack", "own", "clean")[0] == 0
    splits = OwnImages(str(photos), size=8).load()
    changed_labels(photos, repair=False)
    rebuilt = OwnImages(str(photos), size=8).load()
    assert all(torch.equal(rebuilt[name].y, images.y) for name, images in splits.items())
    changed_labels(photos, repair=True)
    for line in ("attack own pgd-10 --n 3", "attack own clean --n 2", "calibrate own --risk 0.5",
                 "export own -o guard"):  # fmt: skip
        code, out, err = command(*line.split())
        assert code == 2, f"{line}: {out}"
        assert "labels are not those that own was trained with: expected digest" in err
    assert not Path("guard").exists()


@pytest.mark.parametrize("damage", ["pixels.npy", "y.npy", "data.csv", "cache.json"])
def test_a_damaged_cache_is_built_again(photos: Path, damage: str) -> None:
    before = OwnImages(str(photos), size=8).load()
    (file,) = cache_folder().glob(f"images/*/{damage}")
    content = bytearray(file.read_bytes())
    for position in (0, len(content) // 2, len(content) - 2):
        damaged = content.copy()
        damaged[position] ^= 0xFF
        file.write_bytes(damaged)
        after = OwnImages(str(photos), size=8).load()
        assert all(after[name].digest() == images.digest() for name, images in before.items())
        assert file.read_bytes() == content


def test_the_command_keeps_class_names_files_and_logs(
    command: Command, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"data={photos}", "size=8", *BRIEF, "--out", "runs/own", "--log", "csv,tensorboard"]
    code, _, err = command("train", "images-pgdat-rr-small", *words)
    assert code == 0, err
    assert "60 images in 3 classes (cat 20, dog 20, fish 20)" in err
    run = Run.open("own")
    assert run.recipe.data.class_names == CLASSES
    listing = (run.path / "data.csv").read_bytes()
    assert run.checkpoint["data_listing"] == content_digest(listing)
    assert listing.decode().count("\n") == 61
    rows = (run.path / "metrics.csv").read_text().splitlines()
    epochs = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0].split(",") == list(epochs[0])
    assert [float(row.split(",")[1]) for row in rows[1:]] == [line["loss"] for line in epochs]
    assert scalars(run.path / "tensorboard", "loss") == pytest.approx(
        [line["loss"] for line in epochs]
    )
    code, _, err = command("attack", "own", "clean", "--n", "9")
    assert code == 0, err
    for words in (["score", "own"], ["list", "own"], ["list", "runs"]):
        code, out, err = command(*words)
        assert code == 0, err
    assert "own: finished" in out.replace("  ", ": ", 1)
    code, _, err = command("train", "images-pgdat-rr-small", f"data={photos}", "--log", "paper")
    assert code == 2
    assert "no log is called 'paper'" in err
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = command(
        "train", "images-pgdat-rr-small", f"data={photos}", "--out", "runs/new",
        "--log", "tensorboard",
    )  # fmt: skip
    assert code == 2
    assert "pip install 'demur[tensorboard]'" in err
    assert not Path("runs/new").exists()


def scalars(folder: Path, name: str) -> list[float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars(name)]


@pytest.mark.parametrize(("size", "last"), [(32, 4), (64, 8), (96, 3), (224, 7)])
def test_the_stem_of_resnet18_depends_on_the_size(size: int, last: int) -> None:
    domain = Domain(3, (3, size, size), (0.5,) * 3, (0.25,) * 3)
    net = ResNet18(width=2).build(domain, RR()).eval()
    maps: list[Tensor] = []
    net.trunk.norm.register_forward_hook(lambda _m, _i, out: maps.append(out))  # type: ignore[union-attr]
    assert net(torch.rand(1, 3, size, size)).logits.shape == (1, 3)
    assert maps[0].shape[2:] == (last, last)


# ------------------------------------------------------------------------------------ factories


class Wide(nn.Module):
    """A net with a named feature layer and no linear layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.last = nn.Conv2d(6, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.body(x)).mean((2, 3))
        return logits


def plain(num_classes: int, channels: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * size**2, 5), nn.ReLU(), nn.Linear(5, num_classes)
    )


@pytest.fixture
def my_nets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's with factories."""
    module = ModuleType("my_nets")
    vars(module).update(Wide=Wide, plain=plain, wrong=lambda: 3, fails=lambda: 1 / 0)
    vars(module)["softmax"] = lambda: nn.Sequential(plain(3, 3, 8), nn.Softmax(1))
    monkeypatch.setitem(sys.modules, "my_nets", module)
    monkeypatch.setattr(importing, "_TYPED", set())
    return module


DOMAIN = Domain(3, (3, 8, 8), (0.5,) * 3, (0.25,) * 3)


def test_a_factory_gives_the_net_and_the_head_reads_its_features(my_nets: ModuleType) -> None:
    importing.allow_import("my_nets:plain")
    importing.allow_import("my_nets:Wide")
    x = torch.rand(4, 3, 8, 8)
    net = FactoryNet("my_nets:plain").build(DOMAIN, RR(), seed=3).eval()
    torch.default_generator.manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        own = plain(3, 3, 8).eval()
    out = net(x)
    assert torch.equal(out.logits, own(x)), "no normalisation, the same initial weights"
    assert torch.equal(out.feature, own[:3](x))  # type: ignore[index]
    named = FactoryNet("my_nets:Wide", layer="body").build(DOMAIN, RR()).eval()
    out = named(x)
    module = named.trunk.module
    assert torch.equal(out.logits, module(x))  # type: ignore[operator]
    assert torch.equal(out.feature, module.body(x).mean((2, 3)))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (FactoryNet("my_nets:Wide"), "has no linear layer; name the layer"),
        (FactoryNet("my_nets:Wide", layer="tail"), "has no layer 'tail'"),
        (FactoryNet("my_nets:wrong"), "must return a torch.nn.Module"),
        (FactoryNet("my_nets:fails"), r"fails \(ZeroDivisionError"),
        (FactoryNet("my_nets:softmax"), "does not return the logits"),
        (FactoryNet("my_nets:nothing"), r"cannot be imported \(AttributeError"),
    ],
)
def test_bad_factories_say_what_to_do(spec: FactoryNet, message: str, my_nets: ModuleType) -> None:
    importing.allow_import(spec.function)
    with pytest.raises(BadInput, match=message):
        spec.build(DOMAIN, RR())


def test_a_recipe_file_imports_no_factory(
    photos: Path, tmp_path: Path, my_nets: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is loaded already is not enough: any of its functions could be called."""
    brief = ["size=8", *BRIEF[:2], "attack.steps=1", "validation_attack.steps=1"]
    typed = recipe("images-pgdat-rr-small", [f"data={photos}", *brief, "net=my_nets:plain"])
    run = train(typed, tmp_path / "run")
    assert run.net(torch.device("cpu")).domain.classes == 3
    importing._TYPED.clear()  # another process
    with pytest.raises(BadInput, match="allow it with DEMUR_MODULES=my_nets"):
        Run(run.path).net(torch.device("cpu"))
    monkeypatch.setenv("DEMUR_MODULES", "other,my_nets")
    assert Run(run.path).net(torch.device("cpu")).domain.classes == 3
    for text in ("os.system", "os:", ":system", "os:system('x')"):
        with pytest.raises(BadInput, match="write module:name"):
            FactoryNet(text)
