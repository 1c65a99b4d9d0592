"""Random numbers that depend on (seed, image index, stream) and on nothing else.

    uniform(0, index, stream=3, shape=(3, 32, 32))    # N, 3, 32, 32 in [0, 1)

A counter-based generator: each number is a hash of its own address, so batch size, sharding and
resuming change nothing, no generator state is kept, and uniform numbers are the same on any
device. A stream may be a tensor, so that a captured step draws anew each time it is replayed.
"""

import math

import torch
from torch import Tensor

from demur import noise_kernels

Stream = int | Tensor  # a whole number below 2^63, or one held on a device

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def uniform(seed: Stream, index: Tensor, stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) of the given shape for each image index."""
    if index.is_cuda and noise_kernels.AVAILABLE:
        held = (_held(word, index.device) for word in (seed, stream))
        return noise_kernels.uniform(next(held), index, next(held), shape)
    count = math.prod(shape)
    first, second = _keys(seed, index, stream)
    place = torch.arange(count, device=index.device)[None, :] * _GOLDEN & _MASK  # 1, count
    bits = _mixed((_mixed((place + first[:, None]) & _MASK) + second[:, None]) & _MASK)
    return ((bits >> 8).float() / 2**24).view(len(index), *shape)  # 24 bits fill a float exactly


def normal(seed: Stream, index: Tensor, stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers of the given shape for each image index."""
    pairs = uniform(seed, index, stream, (2, *shape))
    radius = (-2 * torch.log1p(-pairs[:, 0])).sqrt()
    return radius * torch.cos(2 * math.pi * pairs[:, 1])


def permutation(seed: Stream, count: int, stream: Stream) -> Tensor:
    """The numbers 0 ... count-1 in a random order."""
    first, second = _keys(seed, torch.arange(count), stream)
    return ((first << 31) + second).argsort(stable=True)


def derived(seed: Stream, *words: Stream) -> Stream:
    """A seed of its own for each purpose: a hash of a seed and some whole numbers."""
    there = next((w.device for w in (seed, *words) if isinstance(w, Tensor)), torch.device("cpu"))
    held = [_held(word, there) for word in (seed, *words)]
    if there.type == "cuda" and noise_kernels.AVAILABLE:
        return noise_kernels.derived(held)
    key = held[0]
    for word in (_held(len(words), there), *held[1:]):
        first, second = _keys(key, word, 0)
        key = first << 31 ^ second
    return key if any(isinstance(word, Tensor) for word in (seed, *words)) else int(key)


def _held(word: Stream, device: torch.device) -> Tensor:
    """A whole number on a device."""
    if isinstance(word, Tensor):
        return word
    return torch.full((1,), word, dtype=torch.int64, device=device)


def _keys(seed: Stream, index: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
    """Two independent 32-bit hashes of (seed, index, stream)."""
    keys = []
    for salt in (1, 2):
        key = torch.full_like(index, (salt * _GOLDEN) & _MASK, dtype=torch.int64)
        for word in (*_halves(seed), index, *_halves(stream)):
            key = _mixed((key * 5 + word + 1) & _MASK)
        keys.append(key)
    return keys[0], keys[1]


def _halves(number: Stream) -> tuple[Stream, Stream]:
    return number & _MASK, number >> 32 & _MASK


def _mixed(h: Tensor) -> Tensor:
    """A 32-bit integer hash held in int64; no product overflows."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD & _MASK
    h = (h ^ (h >> 15)) * 0x735A2D97 & _MASK
    return h ^ (h >> 15)
