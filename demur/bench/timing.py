"""Clocks: seconds of a repeated action on a device, and what the device can do at most."""

import time
from collections.abc import Callable

import torch

MATRIX = 8192
COPY = 2**28  # floats


def wait(device: torch.device) -> None:
    """Go on when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(action: Callable[[int], object], times: int, device: torch.device) -> float:
    """Seconds of one action, of many in a row."""
    wait(device)
    began = time.perf_counter()
    for i in range(times):
        action(i)
    wait(device)
    return (time.perf_counter() - began) / times


def best_of_restarts(action: Callable[[int], object], times: int, device: torch.device) -> float:
    """The better of two trials after a short warm-up."""
    seconds_each(action, min(3, times), device)
    return min(seconds_each(action, times, device) for _ in range(2))


def matrix_peak(device: torch.device) -> float | None:
    """Operations a second of a large bf16 matrix product on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX**3 / best_of_restarts(lambda i: a @ b, 20, device)


def copy_rate(device: torch.device) -> float | None:
    """Bytes a second that a GPU's memory reads and writes in a copy; None on a CPU."""
    if device.type != "cuda":
        return None
    evaluator = torch.zeros(COPY, device=device)
    target = torch.empty_like(evaluator)
    return 2 * 4 * COPY / best_of_restarts(lambda i: target.copy_(evaluator), 10, device)
