"""Wall-clock seconds of an action and the GPU kernels behind it.

seconds = best_of_two(step, 100, device)
kernels = time_by_kind(kernels_of(step), seconds)
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

PROFILED_STEPS = 3
SHORTEST_MS = 0.001  # shorter differences are not reported
KINDS = {  # a kernel belongs to the first kind of which its name contains a part
    "batch norm, ReLU, residual sums": (
        "sums_kernel", "normalise_kernel", "affine_kernel", "grad_kernel", "batch_norm",
    ),
    "compiled, element by element": ("triton_poi",),
    "compiled reductions": ("triton_red", "triton_per"),
    "convolutions and matrix products": (
        "gemm", "gemv", "nvjet", "splitK", "fprop", "dgrad", "wgrad", "conv", "cutlass",
    ),
    "copies and fills": ("copy", "Copy", "Memcpy", "Memset", "fill", "Fill", "elementwise_kernel"),
    "optimiser, averaging": ("multi_tensor",),
}  # fmt: skip
MATRIX_SIZE = 8192
COPY_SIZE = 2**28  # floats


def wait(device: torch.device) -> None:
    """Synchronise with a GPU; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(action: Callable[[int], object], times: int, device: torch.device) -> float:
    """Mean seconds per action of `times` actions in a row."""
    wait(device)
    start = time.perf_counter()
    for i in range(times):
        action(i)
    wait(device)
    return (time.perf_counter() - start) / times


def best_of_two(action: Callable[[int], object], times: int, device: torch.device) -> float:
    """Mean seconds per action: the faster of two trials after a short warm-up."""
    seconds_each(action, min(3, times), device)
    return min(seconds_each(action, times, device) for _ in range(2))


def matrix_peak(device: torch.device) -> float | None:
    """Measured FLOP/s of a large bf16 matrix product on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    n = MATRIX_SIZE
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / best_of_two(lambda i: a @ b, 20, device)


def copy_rate(device: torch.device) -> float | None:
    """Measured bytes/s, read plus written, of a copy in GPU memory; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.zeros(COPY_SIZE, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * COPY_SIZE / best_of_two(lambda i: target.copy_(source), 10, device)


class KernelTime(NamedTuple):
    """The launches and milliseconds of one kernel in one step."""

    launches: float
    ms: float


def kernels_of(action: Callable[[int], object]) -> dict[str, KernelTime]:
    """Profile a step; return its kernels by name, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(PROFILED_STEPS):
            action(i)
        torch.cuda.synchronize()
    spent: dict[str, KernelTime] = {}
    for event in profiler.events() or ():
        if "CUDA" in str(event.device_type):
            launches, ms = spent.get(event.name, (0.0, 0.0))
            event_ms = event.device_time / 1000 / PROFILED_STEPS
            spent[event.name] = KernelTime(launches + 1 / PROFILED_STEPS, ms + event_ms)
    return dict(sorted(spent.items(), key=lambda item: -item[1].ms))


def time_by_kind(kernels: dict[str, KernelTime], seconds: float) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel; the rest of `seconds` is idle time."""
    spent: dict[str, float] = defaultdict(float)
    for name, kernel in kernels.items():
        spent[_kind(name)] += kernel.ms
    spent["between kernels"] = max(0.0, 1000 * seconds - sum(spent.values()))
    return {kind: round(ms, 3) for kind, ms in sorted(spent.items(), key=lambda item: -item[1])}


def kernel_difference(
    one: dict[str, KernelTime], other: dict[str, KernelTime]
) -> dict[str, KernelTime]:
    """Launches and milliseconds of one step minus those of another, the largest first."""
    difference = {}
    for name in {**one, **other}:
        (launches, ms), (other_launches, other_ms) = (
            kernels.get(name, (0.0, 0.0)) for kernels in (one, other)
        )
        difference[name] = KernelTime(launches - other_launches, ms - other_ms)
    reported = {name: time for name, time in difference.items() if abs(time.ms) >= SHORTEST_MS}
    return dict(sorted(reported.items(), key=lambda item: -item[1].ms))


def kernels_json(kernels: dict[str, KernelTime]) -> dict[str, dict[str, float]]:
    """Kernels as JSON values."""
    return {
        name: {field: round(value, 4) for field, value in kernel._asdict().items()}
        for name, kernel in kernels.items()
    }


def _kind(name: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other"
