"""Speed of training on images that stream from a file, beside images that live on the device.

    python benchmarks/streaming.py --net "ResNet18(width=32)" --size 64 --batches 6 --rounds 5

Both train the same net on the same images, one epoch each in turn, so that a busy machine slows
both. `ratio` is that of the median images per second. `cpu_ratio` is that of the processor seconds
per image, with those of the worker processes: the ratio of speeds if no core were free for them.
"""

import gc
import json
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer

from demur.cli.app import main
from demur.data import Images, MappedImages, OwnImages
from demur.numerics import device_by_name
from demur.recipes import RECIPES, Recipe, with_changes
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
def streaming(
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


if __name__ == "__main__":
    main(app)
