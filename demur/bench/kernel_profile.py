"""Where the time of a step goes on a GPU: by kind of kernel, and between kernels."""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
LEAST = 0.001  # milliseconds that are worth telling
KINDS = {  # the first kind with a word in a kernel's name takes it
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


class KernelTime(NamedTuple):
    """What a step spends on one kernel."""

    launches: float
    ms: float


def kernels_of(action: Callable[[int], object]) -> dict[str, KernelTime]:
    """The kernels of a step by name, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for i in range(STEPS):
            action(i)
        torch.cuda.synchronize()
    spent: dict[str, KernelTime] = {}
    for event in seen.events() or ():
        if "CUDA" in str(event.device_type):
            launches, ms = spent.get(event.name, (0.0, 0.0))
            took = event.device_time / 1000 / STEPS
            spent[event.name] = KernelTime(launches + 1 / STEPS, ms + took)
    return dict(sorted(spent.items(), key=lambda item: -item[1].ms))


def time_by_kind(kernels: dict[str, KernelTime], seconds: float) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel; what is left of `seconds` is idle."""
    spent: dict[str, float] = defaultdict(float)
    for name, each in kernels.items():
        spent[_kind(name)] += each.ms
    spent["between kernels"] = max(0.0, 1000 * seconds - sum(spent.values()))
    return {kind: round(ms, 3) for kind, ms in sorted(spent.items(), key=lambda item: -item[1])}


def added(one: dict[str, KernelTime], other: dict[str, KernelTime]) -> dict[str, KernelTime]:
    """What one step spends more than another by kernel, the most first; where less, negative."""
    more = {}
    for name in {**one, **other}:
        (launches, ms), (less, shorter) = (part.get(name, (0.0, 0.0)) for part in (one, other))
        more[name] = KernelTime(launches - less, ms - shorter)
    counted = {name: spent for name, spent in more.items() if abs(spent.ms) >= LEAST}
    return dict(sorted(counted.items(), key=lambda item: -item[1].ms))


def plain_kernels(kernels: dict[str, KernelTime]) -> dict[str, dict[str, float]]:
    """Kernels as JSON values."""
    return {
        name: {part: round(value, 4) for part, value in spent._asdict().items()}
        for name, spent in kernels.items()
    }


def _kind(name: str) -> str:
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    return "other"
