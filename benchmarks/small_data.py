"""What the recipes images-*-small learn from a few hundred images, beside a plain net.

    python benchmarks/small_data.py --set shapes --set textures --set colours
    python benchmarks/small_data.py --set cifar --data FOLDER --images 81 -o small-data.json

Each set has five classes. The synthetic ones are drawn here; `cifar` takes the first images of five
classes of CIFAR-10 and 200 test images of each. The plain net is the same ResNet8 in fifteen lines
of PyTorch: Adam, flips, as many images shown. Attacked accuracy is that under PGD-10.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from demur.attacks import PGD, Clean
from demur.attacks.balls import Linf
from demur.cli.app import main
from demur.data import CIFAR10, Images
from demur.methods import NoHead
from demur.nets import RejectingNet
from demur.output import prediction
from demur.recipes import Recipe, recipe
from demur.training import train

CLASSES, SIDE, TEST = 5, 32, 200  # test images of each class
Pixels = NDArray[np.uint8]
program = typer.Typer(name="small-data")


def shapes(label: int, draw: np.random.Generator) -> Pixels:
    """Disc, square, triangle, cross or ring, of any colour and place, in noise."""
    y, x = np.mgrid[:SIDE, :SIDE] - draw.uniform(11, 21, (2, 1, 1))
    r = draw.uniform(6, 10)
    far, square = np.hypot(x, y), np.maximum(abs(x), abs(y))
    inside = (
        far < r, square < 0.85 * r, (y < 0.6 * r) & (y > 2 * abs(x) - r),
        (square < r) & (np.minimum(abs(x), abs(y)) < 0.3 * r), (far < r) & (far > 0.6 * r),
    )[label]  # fmt: skip
    return _painted(inside, draw)


def textures(label: int, draw: np.random.Generator) -> Pixels:
    """Stripes in three directions, a chessboard or dots, of any width, phase and colour."""
    y, x = np.mgrid[:SIDE, :SIDE] * draw.uniform(0.7, 1.2) + draw.uniform(0, 9, (2, 1, 1))
    inside = (
        np.sin(x) > 0, np.sin(y) > 0, np.sin(0.7 * (x + y)) > 0, np.sin(x) * np.sin(y) > 0,
        np.cos(x) + np.cos(y) > 0.9,
    )[label]  # fmt: skip
    return _painted(inside, draw)


def colours(label: int, draw: np.random.Generator) -> Pixels:
    """Five hues in patches of any shape, with patches of random other colours."""
    hue = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1]])[label]
    coarse = draw.uniform(0, 1, (4, 4, 3)) + 0.5 * hue * (draw.uniform(0, 1, (4, 4, 1)) > 0.4)
    return _noisy(80 * np.kron(coarse, np.ones((SIDE // 4, SIDE // 4, 1))) + 40, draw)


def _painted(inside: NDArray[np.bool_], draw: np.random.Generator) -> Pixels:
    """Two colours that differ by at least 60 levels in one channel, with noise."""
    back, front = draw.uniform(40, 215, (2, 3))
    if abs(front - back).max() < 60:
        front = (back + 110) % 215
    return _noisy(np.where(inside[..., None], front, back), draw)


def _noisy(image: NDArray[np.float64], draw: np.random.Generator) -> Pixels:
    return (image + draw.normal(0, 25, (SIDE, SIDE, 3))).clip(0, 255).astype(np.uint8)


SETS: dict[str, Callable[[int, np.random.Generator], Pixels]] = {
    "shapes": shapes, "textures": textures, "colours": colours,
}  # fmt: skip


def write_set(
    path: Path, name: str, images: int, test: int | None = None, folder: str = ""
) -> Path:
    """Write an .npz with so many images of each class to train and to test."""
    arrays: dict[str, NDArray[np.generic]] = {}
    parts = {"train": images, "test": test or TEST}
    if name in SETS:
        draw = np.random.default_rng(0)
        for part, count in parts.items():
            y = np.arange(count * CLASSES) % CLASSES
            arrays |= {f"x_{part}": np.stack([SETS[name](int(k), draw) for k in y]), f"y_{part}": y}
    else:
        splits = CIFAR10(split="paper").load(Path(folder) if folder else None)
        for part, count in parts.items():
            source = splits["fit" if part == "train" else "test"]
            rows = [torch.nonzero(source.y == k)[:count, 0] for k in range(CLASSES)]
            chosen = torch.cat(rows)
            pixels = source.pixels[chosen].movedim(1, -1)
            arrays |= {f"x_{part}": pixels.numpy(), f"y_{part}": source.y[chosen].numpy()}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def plain_net(made: Recipe, fit: Images) -> RejectingNet:
    """The net of a recipe, trained without demur's loop: Adam, flips, as many images shown."""
    net = made.net.build(made.data.domain, NoHead(), 0).train()
    shown = made.epochs * made.passes(len(fit)) * len(fit)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3, weight_decay=5e-4)
    steps, draw = shown // made.batch_size, torch.Generator().manual_seed(0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, steps)
    for _ in range(steps):
        x, y = fit.batch(torch.randint(len(fit), (made.batch_size,), generator=draw))
        x = torch.where(torch.rand(len(x), 1, 1, 1, generator=draw) < 0.5, x.flip(-1), x)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x).logits, y).backward()
        optimiser.step()
        rates.step()
    return net.eval()


def accuracy(net: RejectingNet, images: Images, eps: float) -> float:
    """Percent of the images that are classified correctly; under PGD-10 unless eps is 0."""
    attack, right = PGD(Linf(eps), steps=10) if eps else Clean(), 0
    for piece in images.slices(250):
        x, y = images.batch(piece)
        x = attack.perturb(net, x, y, images.index[piece])
        with torch.no_grad():
            right += int((prediction(net(x)) == y).sum())
    return 100 * right / len(images)


def measure(path: Path, kind: str, eps: int, changes: list[str]) -> dict[str, Any]:
    """Train one net on a set and measure it on the test images; `eps` in 1/255."""
    name = "standard" if kind == "plain" else kind
    made = recipe(f"images-{name}-small", [f"data={path}", f"eps={max(eps, 1)}/255", *changes])
    made = replace(made, data=made.data.prepared())
    splits, start = made.data.load(), time.monotonic()
    if kind == "plain":
        net = plain_net(made, splits["fit"])
    else:
        with TemporaryDirectory() as folder:
            run = train(made, Path(folder) / "run")
            net = run.net(torch.device("cpu")).eval()
    minutes = (time.monotonic() - start) / 60
    found: dict[str, Any] = {
        "set": path.stem, "net": kind, "eps": eps, "fit": len(splits["fit"]),
        "test": len(splits["test"]),
        "clean": accuracy(net, splits["test"], 0), "minutes": round(minutes, 2),
    }  # fmt: skip
    return found | {f"attacked-{k}": accuracy(net, splits["test"], k / 255) for k in {2, eps} - {0}}


@program.command()
def small_data(
    sets: Annotated[list[str], typer.Option("--set", help="shapes, textures, colours, cifar.")],
    eps: Annotated[list[int], typer.Option(help="Radii in 1/255.")] = [2, 4, 8],  # noqa: B006
    images: Annotated[int, typer.Option(help="Images of each class.")] = 81,
    data: Annotated[str, typer.Option(help="Folder of CIFAR-10.")] = "",
    change: Annotated[list[str] | None, typer.Option(help="Changes of the recipes.")] = None,
    out: Annotated[str, typer.Option("-o", help="A JSON file.")] = "",
) -> None:
    """Print one line per net: clean and attacked accuracy and minutes."""
    rows = []
    with TemporaryDirectory() as folder:
        for name in sets:
            path = write_set(Path(folder) / f"{name}.npz", name, images, folder=data)
            for kind, radius in [("plain", 0), ("standard", 0), *(("pgdat-rr", k) for k in eps)]:
                rows.append(measure(path, kind, radius, change or []))
                typer.echo(json.dumps(rows[-1]))
    if out:
        Path(out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(program)
