"""Timing of repeated actions on a device, and the peak rates of the device."""

import time
from collections.abc import Callable

import torch

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
