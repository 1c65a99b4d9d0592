"""What each stage of the fast engine gains: milliseconds of a training step.

    python3 benchmarks/ablation.py -o FILE.json [--steps N] [--device cpu|cuda] [--only NAME,...]

The recipe is cifar10-pgdat-rr on random images of CIFAR's shape. Kernels are switched off by
replacing a function of the engine while a step is captured; the package has no switches. The file
is written after every stage, and the same command continues it. A CPU tries the script with a tiny
net, the parts with Triton kernels only where Triton's interpreter is installed.
"""

import argparse
import json
import statistics
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from demur.data import Images
from demur.engine import Compiler, frozen, fused_norm
from demur.numerics import fusing
from demur.recipes import Recipe, recipe
from demur.runs import provenance
from demur.spec import show
from demur.training import FastSteps, PlainSteps, TrainState, step
from reports import Reports
from timing import seconds_each, wait

TURNS = 3  # timings of each capture; the median counts
TINY = ["width=4", "batch_size=8", "attack.steps=2"]  # on a CPU
SETTINGS = {  # batch-norm mode during the attack, batch size
    "train": ["bn=train"],
    "eval": ["bn=eval"],
    "large": ["bn=eval", "batch_size=1024"],
}


# ------------------------------------------------------------------ stages

Patches = list[AbstractContextManager[Any]]


def without_kernels() -> Patches:
    """Compile the whole net instead of fusing batch norm by hand."""
    return [patch.object(module, "fused_supported", lambda *_: False) for module in (frozen, step)]


def kernels_on_cpu() -> Patches:
    """Let a CPU take the fused path, for Triton's interpreter."""
    return [patch.object(module, "fused_supported", lambda *_: True) for module in (frozen, step)]


@dataclass(frozen=True)
class Stage:
    """A step to time: which parts of the engine it has, and how often it is captured."""

    name: str
    kernels: bool = True
    graph: bool = True
    captures: int = 2  # captures of one step differ by up to 1%


STAGES = (
    Stage("compile only", kernels=False, graph=False, captures=1),
    Stage("+ frozen copy and CUDA graph", kernels=False),
    Stage("+ norm kernels"),
)


# ------------------------------------------------------------------ measurement


def random_images(spec: Recipe, count: int, device: torch.device) -> Images:
    """Return random images of the data set's shape."""
    domain, g = spec.data.domain, torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *domain.shape), dtype=torch.uint8, generator=g)
    y = torch.randint(0, domain.classes, (count,), generator=g)
    return Images(pixels, y, torch.arange(count), 255).to(device)


def make_steps(
    spec: Recipe, stage: Stage, count: int, device: torch.device, compiler: Compiler
) -> PlainSteps:
    """Return the steps of a stage, compiled and captured."""
    train_state = TrainState(spec, device, channels_last=True)
    fit = random_images(spec, count * spec.batch_size, device)
    steps: PlainSteps
    if stage.graph:
        steps = FastSteps(spec, train_state, fit, compiler, on_message=_fail)
    else:
        if compiler != "none":
            train_state.net.compile(dynamic=False)
        steps = PlainSteps(spec, train_state, fit)
    steps.begin(0)
    take_step(steps, compiler, 0)
    wait(device)
    return steps


def _fail(sentence: str) -> None:
    raise RuntimeError(sentence)  # a fallback to the plain step is not what is measured


def take_step(steps: PlainSteps, compiler: Compiler, i: int) -> None:
    """Take step i; step 0 rewinds to the start of the epoch."""
    if isinstance(steps, FastSteps):
        if i == 0:
            steps.cursor.zero_()
        steps(i)
    else:
        with fusing(compiler == "inductor"):
            steps(i)


def measure(spec: Recipe, stage: Stage, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the median milliseconds of a step for each capture."""
    on_gpu, start = device.type == "cuda", time.perf_counter()
    compiler: Compiler = "inductor" if on_gpu else "none"
    count = max(3, steps * 128 // spec.batch_size) if on_gpu else 3
    ms, losses = [], []
    for _ in range(stage.captures if on_gpu else 1):
        with ExitStack() as stack:
            patches = [] if on_gpu else kernels_on_cpu()
            if not stage.kernels:
                patches = without_kernels()
            for each in patches:
                stack.enter_context(each)
            made = make_steps(spec, stage, count, device, compiler)
            action = partial(take_step, made, compiler)
            turns = [seconds_each(action, count, device) for _ in range(TURNS)]
        ms.append(round(1000 * statistics.median(turns), 4))
        losses.append(round(float(made.losses[0]), 4))
        del made, action
        if on_gpu:
            torch.cuda.empty_cache()
    seconds = round(time.perf_counter() - start, 1)
    # the last loss of the first batch shows a switched-off device that changes the result
    return {"ms": ms, "median_ms": statistics.median(ms), "seconds": seconds, "losses": losses}


def row_of(
    setting: str, spec: Recipe, stage: Stage, steps: int, device: torch.device
) -> dict[str, Any]:
    """Measure a stage, or say in a note why that is impossible."""
    row: dict[str, Any] = {"setting": setting, "stage": stage.name}
    if stage.kernels and stage.graph and not fused_norm.AVAILABLE:
        return row | {"note": "needs Triton"}
    try:
        return row | measure(spec, stage, steps, device)
    except Exception as error:  # the other rows are still worth measuring
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return row | {"note": f"cannot be measured: {text}"}


def main() -> None:
    """Measure what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60, help="steps of 128 images per timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="settings or stages, comma-separated")
    options = parser.parse_args()
    device, only = torch.device(options.device), {n for n in options.only.split(",") if n}
    changes = TINY if device.type == "cpu" else []
    base = recipe("cifar10-pgdat-rr", changes)
    report: dict[str, Any] = {
        "machine": provenance(device), "recipe": show(base, full=True), "steps": options.steps,
        "rows": [],
    }  # fmt: skip
    earlier = json.loads(options.out.read_text()) if options.out.exists() else {}
    report["rows"] = list(Reports(earlier=earlier).known(report, "rows") or [])
    done = {(row["setting"], row["stage"]) for row in report["rows"]}
    names = {*SETTINGS, *(c.name for c in STAGES)}
    if unknown := only - names:
        raise SystemExit(f"no such name: {', '.join(unknown)}; use {', '.join(sorted(names))}")
    for setting, values in SETTINGS.items():
        spec = recipe("cifar10-pgdat-rr", [*values, *changes])
        for stage in STAGES:
            wanted = [kind & only for kind in ({*SETTINGS}, names - {*SETTINGS})]
            chosen = (not wanted[0] or setting in only) and (not wanted[1] or stage.name in only)
            if not chosen or (setting, stage.name) in done:
                continue
            row = row_of(setting, spec, stage, options.steps, device)
            report["rows"].append(row)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            shown = row.get("note") or f"{row['median_ms']:.3f} ms {row['ms']}, {row['seconds']} s"
            print(f"{setting:6} {stage.name:32} {shown}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
