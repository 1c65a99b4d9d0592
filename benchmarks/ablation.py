"""What each device of the fast engine gains: milliseconds of a training step with and without it.

    python3 benchmarks/ablation.py -o FILE.json [--steps N] [--device cpu|cuda] [--only NAME,...]

The recipe is cifar10-pgdat-rr on random images of CIFAR's shape. A device is switched off by
replacing a function of the engine while a step is captured; the package has no switches. The file
is written after every configuration, and the same command continues it. A CPU tries the script with
a tiny net, the parts with Triton kernels only where Triton's interpreter is installed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from demur.bench.reports import Reports
from demur.bench.timing import seconds_each, wait
from demur.data import Images
from demur.engine import Compiler, frozen, fused_norm, fused_resnet
from demur.engine.convolutions import CastWeights, FrozenWeight
from demur.fused import fusing
from demur.recipes import Recipe, recipe
from demur.runs import provenance
from demur.spec import show
from demur.training import FastSteps, PlainSteps, TrainState, fast

TURNS = 3  # timings of each capture; the median counts
TINY = ["width=4", "batch_size=8", "attack.steps=2"]  # on a CPU
SETTINGS = {  # batch-norm mode during the attack, batch size
    "train": ["bn=train"],
    "eval": ["bn=eval"],
    "large": ["bn=eval", "batch_size=1024"],
}


# ------------------------------------------------------------------ devices, switched off


def two_convolutions(
    active: Tensor, weight1x1: Tensor, weight3x3: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Return what fork_convolutions returns; autograd adds the two input gradients."""
    return conv2d(active, weight1x1, stride=stride), conv2d(
        active, weight3x3, stride=stride, padding=1
    )


def add_whole_gradient(grad_active: Tensor, grad_skip: Tensor, weight: Tensor, stride: int) -> None:
    """Add the input gradient of the 1x1 convolution as a whole tensor, mostly zeros."""
    whole, *_ = torch.ops.aten.convolution_backward(
        grad_skip, grad_active, weight, None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1,
        [True, False, False],
    )  # fmt: skip
    grad_active.add_(whole)


@contextmanager
def cast_one_by_one(self: CastWeights) -> Iterator[None]:
    """Cast each weight, and its gradient back, in a kernel of its own, as autocast does."""
    weights = tuple(conv.weight.to(self.dtype) for conv in self)
    self._set_weights(weights)
    try:
        yield
    finally:
        self._set_weights(tuple(weight.detach() for weight in weights))


def copy_one_by_one(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def without_flipped_copy(self: FrozenWeight, conv: torch.nn.Conv2d) -> None:
    """Leave the input gradient to cuDNN."""
    self.weight, self.stride, self.flipped = conv.weight.detach(), conv.stride[0], None


Patches = list[AbstractContextManager[Any]]


@dataclass(frozen=True)
class Device:
    """A part of the engine that can be switched off."""

    name: str
    off: Callable[[], Patches]
    train_only: bool = False  # not used where the attack runs in eval mode


DEVICES = (  # in the order in which the engine grew
    Device(
        "fork",
        lambda: [
            patch.object(fused_resnet, "fork_convolutions", two_convolutions),
            patch.object(fused_resnet, "add_shortcut_gradient", add_whole_gradient),
        ],
    ),
    Device("grouped casts", lambda: [patch.object(CastWeights, "refreshed", cast_one_by_one)]),
    Device("grouped copies", lambda: [patch.object(fused_resnet, "copy_tensors", copy_one_by_one)]),
    Device(
        "deferred head statistics",
        lambda: [patch.object(fused_resnet, "DeferredBatchNormStats", lambda aux, compiler: None)],
        train_only=True,
    ),
    Device(
        "flipped weights", lambda: [patch.object(FrozenWeight, "__init__", without_flipped_copy)]
    ),
)


def without_kernels() -> Patches:
    """Compile the whole net instead of fusing batch norm by hand."""
    return [patch.object(module, "fused_supported", lambda *_: False) for module in (frozen, fast)]


def kernels_on_cpu() -> Patches:
    """Let a CPU take the fused path, for Triton's interpreter."""
    return [patch.object(module, "fused_supported", lambda *_: True) for module in (frozen, fast)]


# ------------------------------------------------------------------ configurations


@dataclass(frozen=True)
class Configuration:
    """A step to time: which devices are off, and how often it is captured."""

    name: str
    kind: str  # "whole", "leave one out" or "cumulative"
    off: tuple[Device, ...] = ()
    kernels: bool = True
    graph: bool = True
    captures: int = 3  # captures of one step differ by up to 1%


def configurations() -> list[Configuration]:
    """Return the whole engine, then without each device, then its stages, then whole again."""
    whole = Configuration("whole", "whole")
    left_out = [Configuration(f"without {d.name}", "leave one out", (d,)) for d in DEVICES]
    stages = [
        # far slower than the whole engine, so one capture is enough
        Configuration("compile only", "cumulative", kernels=False, graph=False, captures=1),
        Configuration("+ frozen copy and CUDA graph", "cumulative", kernels=False, captures=1),
        Configuration("+ norm kernels", "cumulative", DEVICES),
    ]
    # the stage before the last device is "without" that device
    for i, device in enumerate(DEVICES[:-2]):
        stages.append(Configuration(f"+ {device.name}", "cumulative", DEVICES[i + 1 :]))
    return [whole, *left_out, *stages, replace(whole, name="whole again")]


# ------------------------------------------------------------------ measurement


def random_images(spec: Recipe, count: int, device: torch.device) -> Images:
    """Return random images of the data set's shape."""
    domain, g = spec.data.domain, torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, *domain.shape), dtype=torch.uint8, generator=g)
    y = torch.randint(0, domain.classes, (count,), generator=g)
    return Images(pixels, y, torch.arange(count), 255).to(device)


def make_steps(
    spec: Recipe, configuration: Configuration, count: int, device: torch.device, compiler: Compiler
) -> PlainSteps:
    """Return the steps of a configuration, compiled and captured."""
    train_state = TrainState(spec, device, channels_last=True)
    fit = random_images(spec, count * spec.batch_size, device)
    steps: PlainSteps
    if configuration.graph:
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


def measure(
    spec: Recipe, configuration: Configuration, steps: int, device: torch.device
) -> dict[str, Any]:
    """Return the median milliseconds of a step for each capture."""
    on_gpu, start = device.type == "cuda", time.perf_counter()
    compiler: Compiler = "inductor" if on_gpu else "none"
    count = max(3, steps * 128 // spec.batch_size) if on_gpu else 3
    ms, losses = [], []
    for _ in range(configuration.captures if on_gpu else 1):
        with ExitStack() as stack:
            patches = [] if on_gpu else kernels_on_cpu()
            if not configuration.kernels:
                patches = without_kernels()
            for off in configuration.off:
                patches += off.off()
            for each in patches:
                stack.enter_context(each)
            made = make_steps(spec, configuration, count, device, compiler)
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
    setting: str, spec: Recipe, configuration: Configuration, steps: int, device: torch.device
) -> dict[str, Any]:
    """Measure a configuration, or say in a note why that is impossible."""
    row: dict[str, Any] = {
        "setting": setting, "configuration": configuration.name, "kind": configuration.kind,
        "off": [off.name for off in configuration.off],
    }  # fmt: skip
    needless = [d.name for d in configuration.off if d.train_only and setting != "train"]
    if configuration.kind == "leave one out" and needless:
        return row | {"note": f"{needless[0]}: not used where the attack runs in eval mode"}
    if configuration.kernels and configuration.graph and not fused_norm.AVAILABLE:
        return row | {"note": "needs Triton"}
    try:
        return row | measure(spec, configuration, steps, device)
    except Exception as error:  # the other rows are still worth measuring
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return row | {"note": f"cannot be measured: {text}"}


def add_gains(rows: list[dict[str, Any]]) -> None:
    """Add to each row its time relative to the whole engine in the same setting, minus 1."""
    for row in rows:
        whole = [
            r["median_ms"]
            for r in rows
            if r["kind"] == "whole" and r["setting"] == row["setting"] and "median_ms" in r
        ]
        if whole and "median_ms" in row:
            row["slower_than_whole"] = round(row["median_ms"] / statistics.mean(whole) - 1, 4)


def main() -> None:
    """Measure what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60, help="steps of 128 images per timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="settings or configurations, comma-separated")
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
    done = {(row["setting"], row["configuration"]) for row in report["rows"]}
    names = {*SETTINGS, *(c.name for c in configurations())}
    if unknown := only - names:
        raise SystemExit(f"no such name: {', '.join(unknown)}; use {', '.join(sorted(names))}")
    for setting, values in SETTINGS.items():
        spec = recipe("cifar10-pgdat-rr", [*values, *changes])
        for configuration in configurations():
            wanted = [kind & only for kind in ({*SETTINGS}, names - {*SETTINGS})]
            chosen = (not wanted[0] or setting in only) and (
                not wanted[1] or configuration.name in only
            )
            if not chosen or (setting, configuration.name) in done:
                continue
            row = row_of(setting, spec, configuration, options.steps, device)
            report["rows"].append(row)
            add_gains(report["rows"])
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            shown = row.get("note") or f"{row['median_ms']:.3f} ms {row['ms']}, {row['seconds']} s"
            print(f"{setting:6} {configuration.name:32} {shown}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
