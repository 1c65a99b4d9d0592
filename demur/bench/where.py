"""Where the time of a step goes on a GPU: by kind of kernel, and between kernels."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
KINDS = {  # the first kind with a word in a kernel's name takes it
    "batch norm, ReLU, residual sums": (
        "sums_kernel", "normalise_kernel", "affine_kernel", "grad_kernel", "batch_norm",
    ),
    "compiled, element by element": ("triton_poi",),
    "compiled reductions": ("triton_red", "triton_per"),
    "convolutions and matrix products": (
        "gemm", "gemv", "nvjet", "splitK", "fprop", "dgrad", "wgrad", "conv", "cutlass",
    ),
    "optimiser": ("multi_tensor",),
    "copies and fills": ("copy", "Memcpy", "Memset", "fill", "Fill", "elementwise_kernel"),
}  # fmt: skip


def where_time_goes(action: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel; what is left of `seconds` is idle."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for i in range(STEPS):
            action(i)
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    for event in seen.events() or ():
        if "CUDA" in str(event.device_type):
            spent[_kind(event.name)] += event.device_time / 1000 / STEPS
    spent["between kernels"] = max(0.0, 1000 * seconds - sum(spent.values()))
    return {kind: round(ms, 3) for kind, ms in sorted(spent.items(), key=lambda item: -item[1])}


def _kind(name: str) -> str:
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    return "other"
