"""Counter-based random numbers: a pure function of (seed, image index, stream).

    uniform(0, index, stream=3, shape=(3, 32, 32))    # N, 3, 32, 32 in [0, 1)

Each number is a hash of its address, so it does not depend on batch size, sharding, resuming or
device, and no generator state exists. The stream may be a tensor, so that a captured CUDA graph
draws new numbers on every replay.
"""

import math

import torch
from torch import Tensor

from demur import noise_kernels

Stream = int | Tensor  # an integer below 2^63, or a one-element int64 tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def uniform(seed: Stream, index: Tensor, stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Return uniform numbers in [0, 1) of shape (N, *shape), for N image indices."""
    if index.is_cuda and noise_kernels.AVAILABLE:
        seed_tensor, stream_tensor = (_as_tensor(word, index.device) for word in (seed, stream))
        return noise_kernels.uniform(seed_tensor, index, stream_tensor, shape)
    count = math.prod(shape)
    first, second = _keys(seed, index, stream)
    position = torch.arange(count, device=index.device)[None, :] * _GOLDEN & _MASK  # 1, count
    bits = _hash32((_hash32((position + first[:, None]) & _MASK) + second[:, None]) & _MASK)
    # A float32 represents 24 bits exactly, so the result is below 1.
    return ((bits >> 8).float() / 2**24).view(len(index), *shape)


def normal(seed: Stream, index: Tensor, stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers of shape (N, *shape) by the Box-Muller transform."""
    pairs = uniform(seed, index, stream, (2, *shape))
    radius = (-2 * torch.log1p(-pairs[:, 0])).sqrt()
    return radius * torch.cos(2 * math.pi * pairs[:, 1])


def permutation(seed: Stream, count: int, stream: Stream) -> Tensor:
    """Return a random permutation of 0 ... count-1."""
    first, second = _keys(seed, torch.arange(count), stream)
    return ((first << 31) + second).argsort(stable=True)


def derive_seed(seed: Stream, *words: Stream) -> Stream:
    """Return a new seed or stream: a hash of `seed` and further integers.

    The result is a tensor if any argument is one, else an int.
    """
    device = next((w.device for w in (seed, *words) if isinstance(w, Tensor)), torch.device("cpu"))
    tensors = [_as_tensor(word, device) for word in (seed, *words)]
    if device.type == "cuda" and noise_kernels.AVAILABLE:
        return noise_kernels.derive_seed(tensors)
    key = tensors[0]
    for word in (_as_tensor(len(words), device), *tensors[1:]):
        first, second = _keys(key, word, 0)
        key = first << 31 ^ second
    return key if any(isinstance(word, Tensor) for word in (seed, *words)) else int(key)


def _as_tensor(word: Stream, device: torch.device) -> Tensor:
    """Return the integer as a one-element int64 tensor on the device."""
    if isinstance(word, Tensor):
        return word
    return torch.full((1,), word, dtype=torch.int64, device=device)


def _keys(seed: Stream, index: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
    """Return two independent 32-bit hashes of (seed, index, stream)."""
    keys = []
    for salt in (1, 2):
        key = torch.full_like(index, (salt * _GOLDEN) & _MASK, dtype=torch.int64)
        for word in (*_halves(seed), index, *_halves(stream)):
            key = _hash32((key * 5 + word + 1) & _MASK)
        keys.append(key)
    return keys[0], keys[1]


def _halves(number: Stream) -> tuple[Stream, Stream]:
    return number & _MASK, number >> 32 & _MASK


def _hash32(h: Tensor) -> Tensor:
    """Return a 32-bit integer hash, computed in int64 so that no product overflows."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD & _MASK
    h = (h ^ (h >> 15)) * 0x735A2D97 & _MASK
    return h ^ (h >> 15)
