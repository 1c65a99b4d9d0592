"""Large sets: training on images that stream from a file, and records of many images.

    python benchmarks/streaming.py training --net "ResNet18(width=32)" --size 64 --batches 6
    python benchmarks/streaming.py records 1000 10000 100000 1000000
    python benchmarks/streaming.py attacks 400 4000 --size 224

`training` trains the same net on the same images on the device, one epoch each in turn, so that a
busy machine slows both. `ratio` is that of the median images per second. `cpu_ratio` is that of the
processor seconds per image, with those of the worker processes: the ratio of speeds if no core were
free for them.

`records` writes a run of synthetic records of 10 classes: a clean and an attacked one, and a tenth
as many cal images. `demur score` and `demur report` read it, each in a process of its own.

`attacks` measures `demur attack` on many test images of an .npz, on a net of one hidden layer with
512 features; `audits` measures `demur audit` on an .npz. PYTHONPATH chooses the demur that runs.
"""

import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import nn

from demur.attacks import Attack, Clean
from demur.cli.app import main
from demur.data import Images, MappedImages, OwnImages
from demur.files.checked_files import write_json, write_text
from demur.noise import normal
from demur.numerics import device_by_name
from demur.recipes import RECIPES, Recipe, attack, with_changes
from demur.runs import Record
from demur.runs.record import identity, record_path, write_record
from demur.spec import digest, lines, show
from demur.training import FastSteps, PlainSteps, TrainState

app = typer.Typer(name="streaming")


def images_in(folder: Path, count: int, size: int) -> MappedImages:
    """Random images in a file."""
    file = folder / "pixels.npy"
    pixels = np.lib.format.open_memmap(file, "w+", np.uint8, (count, 3, size, size))
    for start in range(0, count, 256):
        block = pixels[start : start + 256]
        block[:] = np.random.default_rng(start).integers(0, 256, block.shape, np.uint8)
    pixels.flush()
    y = torch.arange(count) % 10
    return MappedImages(torch.from_numpy(pixels), y, torch.arange(count), 255, file)


def steps_on(recipe: Recipe, fit: Images, device: torch.device) -> PlainSteps:
    """Training steps of the usual engine of the device."""
    on_gpu = device.type == "cuda"
    state = TrainState(recipe, device, channels_last=on_gpu)
    return (FastSteps if on_gpu else PlainSteps)(recipe, state, fit)


def train_epoch(steps: PlainSteps, epoch: int) -> tuple[float, float]:
    """Train one epoch; seconds, and processor seconds of this process."""
    start, cpu_start = time.perf_counter(), time.process_time()
    steps.begin(epoch)
    for i in range(steps.batches):
        steps(i)
    float(steps.losses.sum())  # waits for the device
    return time.perf_counter() - start, time.process_time() - cpu_start


def worker_seconds() -> float:
    """Processor seconds of all worker processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@app.command()
def training(
    net: Annotated[str, typer.Option(help="The net.")] = "ResNet18(width=32)",
    size: Annotated[int, typer.Option(help="Height and width of the images.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 64,
    batches: Annotated[int, typer.Option(help="Steps per epoch.")] = 6,
    rounds: Annotated[int, typer.Option(help="Epochs of each kind.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Print images per second of both kinds and their ratio as JSON."""
    place = device_by_name(device)
    names = tuple(str(i) for i in range(10))
    data = OwnImages("none", size=size, channels=3, classes=names, content="none")
    small = replace(RECIPES["images-pgdat-rr"], data=data, epochs=1000)
    precision = "bf16" if place.type == "cuda" else "fp32"
    recipe = with_changes(
        small, [f"net={net}", f"batch_size={batch_size}", f"precision={precision}"]
    )
    with TemporaryDirectory() as folder:
        mapped = images_in(Path(folder), batch_size * batches, size)
        on_disk = replace(mapped, y=mapped.y.to(place), index=mapped.index.to(place))
        resident = Images(mapped.pixels.clone().to(place), on_disk.y, on_disk.index, 255)
        kinds = {"resident": resident, "streamed": on_disk}
        steps = {name: steps_on(recipe, fit, place) for name, fit in kinds.items()}
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for epoch in range(rounds + 1):  # the first one warms up
            for name, one in steps.items():
                spent[name].append(train_epoch(one, epoch))
        steps.clear()
        gc.collect()  # ends the workers
    count = batch_size * batches
    found = {
        name: count / statistics.median(seconds for seconds, _ in values[1:])
        for name, values in spent.items()
    }
    cpu = {name: sum(seconds for _, seconds in values[1:]) for name, values in spent.items()}
    report = {
        "net": net, "size": size, "batch_size": batch_size, "images": count,
        "rounds": rounds, "device": str(place), **{k: round(v, 1) for k, v in found.items()},
        "ratio": round(found["streamed"] / found["resident"], 3),
        "cpu_ratio": round(cpu["resident"] / (cpu["streamed"] + worker_seconds()), 3),
    }  # fmt: skip
    typer.echo(json.dumps(report))


RECIPE = "digits-pgdat-rr"
LABELS = {"clean": 0.0, "pgd-20": 1.5}  # by how much the attack lowers the true logit


def synthetic_record(label: str, split: str, n: int, classes: int = 10) -> Record:
    """Record of n images whose correct predictions tend to have a higher confidence and A."""
    index, eps = torch.arange(n), 0.0 if label == "clean" else 0.1
    y = index % classes
    z = normal(0, index, len(split) + len(label), (classes + 2,))
    logits = 1.5 * z[:, :classes]
    logits[index, y] += 3 + z[:, classes] - LABELS[label]
    a = (logits.argmax(1) == y) * 2.0 + z[:, classes + 1]
    made: Attack = Clean() if label == "clean" else attack(label, RECIPES[RECIPE])
    size = torch.full((n,), eps)
    arrays = {"y": y, "index": index, "size_linf": size, "size_l2": size, "logits": logits}
    return Record(arrays | {"aux": a[:, None]}, {
        "label": label, "split": split, "digest": identity(label=label, split=split, n=n),
        "spec": show(made, full=True), "attack": digest(made), "weights": "0" * 64, "n": n,
        "data": identity(n=n), "created": f"2026-01-01T00:00:0{len(label)}", "features": False,
        "images": 0, "thresholds": {}, "fitted": {}, "archive": True,
        "recipe": show(RECIPES[RECIPE], full=True),
    })  # fmt: skip


def synthetic_run(folder: Path, n: int) -> Path:
    """Write a run without weights, with a clean and an attacked record of n images."""
    recipe = RECIPES[RECIPE]
    write_text(folder / "recipe.txt", lines(recipe))
    write_json(folder / "checkpoint.json", {
        "epoch": recipe.epochs, "value": None, "weights": "0" * 64, "reason": "synthetic",
        "recipe_digest": digest(recipe),
    })  # fmt: skip
    for label, split, count in (("clean", "cal", n // 10), *((one, "test", n) for one in LABELS)):
        record = synthetic_record(label, split, count)
        write_record(record_path(folder / "records", label, split, record.digest), record)
    return folder


class Cost(NamedTuple):
    """What one command took."""

    seconds: float
    cpu_seconds: float
    megabytes: float  # peak resident


def cost_of(*words: str) -> Cost:
    """Run a demur command in a process of its own."""
    begin, command = time.perf_counter(), [sys.executable, "-m", "demur", *words]
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))))
    own = {"PYTHONPATH": path, "DEMUR_MODULES": "streaming"}  # the nets of this file
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | own) as it:
        _, status, used = os.wait4(it.pid, 0)
        it.returncode = os.waitstatus_to_exitcode(status)
    if it.returncode:
        raise SystemExit(it.returncode)
    cpu = used.ru_utime + used.ru_stime
    return Cost(time.perf_counter() - begin, cpu, used.ru_maxrss / 1024)


def opening_seconds(page: Path) -> float | None:
    """Seconds until Chromium has drawn the explorer; None without playwright or Chromium."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        return None
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=quiet)
        tab, begin = browser.new_page(), time.perf_counter()
        tab.goto(page.as_uri(), timeout=300_000)
        tab.wait_for_function("document.documentElement.dataset.stepMs", timeout=300_000)
        seconds = time.perf_counter() - begin
        browser.close()
    return seconds


@app.command()
def records(
    counts: Annotated[list[int], typer.Argument(metavar="N...", help="Images of a record.")],
) -> None:
    """Print seconds, peak memory and size of the page as a table, a line per number of images."""
    typer.echo(
        "| images | score, s (CPU s) | MB | report, s (CPU s) | MB | page, MB | opens in, s |\n"
        "|---:|---:|---:|---:|---:|---:|---:|"
    )
    for n in counts:
        with TemporaryDirectory() as folder:
            run = synthetic_run(Path(folder) / "run", n)
            page = Path(folder) / "page.html"
            costs = [
                cost_of("score", str(run), "--all"),
                cost_of("report", str(run), "-o", str(page)),
            ]
            spent = (f"{s:.1f} ({cpu:.1f}) | {peak:,.0f}" for s, cpu, peak in costs)
            opening = opening_seconds(page)
            opens = "not measured" if opening is None else f"{opening:.1f}"
            size = page.stat().st_size / 1e6
            typer.echo(f"| {n:,} | {' | '.join(spent)} | {size:.2f} | {opens} |")


def tiny_net(num_classes: int, channels: int, size: int) -> nn.Module:
    """A net that costs little beside the images."""
    hidden = nn.Linear(channels * 64, 512)
    first = nn.AvgPool2d(size // 8), nn.Flatten(), hidden
    return nn.Sequential(*first, nn.ReLU(), nn.Linear(512, num_classes))


@app.command()
def attacks(
    counts: Annotated[list[int], typer.Argument(metavar="N...", help="Images of the test split.")],
    size: Annotated[int, typer.Option(help="Height and width of the images.")] = 8,
    name: Annotated[str, typer.Option(help="The attack.")] = "pgd:steps=1",
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 256,
) -> None:
    """Print seconds and peak memory of `demur attack` as a table, a line per number of images."""
    typer.echo("| images | pixels | seconds (CPU s) | peak resident, MB |\n|---:|---:|---:|---:|")
    for n in counts:
        with TemporaryDirectory() as text:
            os.environ["XDG_CACHE_HOME"] = text
            data, run, splits = f"{text}/data.npz", f"{text}/run", ("train", "val", "cal", "test")
            arrays: dict[str, Any] = {}
            for seed, split in enumerate(splits):
                shape = n if split == "test" else 64, 3, size, size
                generator = np.random.default_rng(seed)
                arrays[f"x_{split}"] = generator.integers(0, 256, shape, np.uint8)
                arrays[f"y_{split}"] = np.arange(shape[0]) % 10
            np.savez(data, **arrays)
            changes = f"data={data}", f"size={size}", "net=streaming:tiny_net", "epochs=1"
            cost_of("train", "images-pgdat-rr", *changes, "--out", run)
            spent, cpu, peak = cost_of("attack", run, name, "--batch-size", str(batch_size))
        typer.echo(f"| {n:,} | 3x{size}x{size} | {spent:.1f} ({cpu:.1f}) | {peak:,.0f} |")


def wrong_net() -> nn.Module:
    """A net that is wrong on the images of `audits`, so that no attack takes time."""
    last = nn.Linear(192, 10)
    with torch.no_grad():
        last.bias[0] = 100.0
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), last).eval()


@app.command()
def audits(
    counts: Annotated[list[int], typer.Argument(metavar="N...", help="Images of the .npz.")],
    size: Annotated[int, typer.Option(help="Height and width of the images.")] = 8,
) -> None:
    """Print seconds and peak memory of `demur audit` as a table, a line per number of images."""
    typer.echo("| images | pixels | seconds (CPU s) | peak resident, MB |\n|---:|---:|---:|---:|")
    for n in counts:
        with TemporaryDirectory() as text:
            pixels = np.random.default_rng(0).integers(0, 256, (n, 3, size, size), np.uint8)
            np.savez(f"{text}/data.npz", x=pixels, y=np.arange(n) % 9 + 1)
            del pixels
            spent, cpu, peak = cost_of(
                "audit", "streaming:wrong_net", "--data", f"{text}/data.npz", "--version", "fast"
            )
        typer.echo(f"| {n:,} | 3x{size}x{size} | {spent:.1f} ({cpu:.1f}) | {peak:,.0f} |")


if __name__ == "__main__":
    main(app)
