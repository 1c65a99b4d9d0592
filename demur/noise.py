"""Counter-based random numbers: a pure function of (seed, image index, stream).

Each number is a hash of its address, so it does not depend on batch size, sharding or device. The
stream may be a tensor, so that a captured CUDA graph draws new numbers on every replay. Triton
gives the same numbers in one launch instead of about a hundred.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

Stream = int | Tensor  # an integer below 2^63, or a one-element int64 tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_BLOCK = 1024  # numbers that one Triton program computes


def uniform(seed: Stream, index: Tensor, stream: Stream, shape: tuple[int, ...]) -> Tensor:
    """Return uniform numbers in [0, 1) of shape (N, *shape), for N image indices."""
    if index.is_cuda and triton is not None:
        seed_tensor, stream_tensor = (_as_tensor(word, index.device) for word in (seed, stream))
        return _uniform_on_gpu(seed_tensor, index, stream_tensor, shape)
    count = math.prod(shape)
    first, second = _keys(seed, index.long(), stream)
    position = torch.arange(count, device=index.device)[None, :] * _GOLDEN & _MASK  # 1, count
    bits: Tensor = _hash32((_hash32((position + first[:, None]) & _MASK) + second[:, None]) & _MASK)
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
    keys: Tensor = (first << 31) + second
    return keys.argsort(stable=True)


def derive_seed(seed: Stream, *words: Stream) -> Stream:
    """Return a new seed or stream: a hash of `seed` and further integers.

    The result is a tensor if any argument is one, else an int.
    """
    device = next((w.device for w in (seed, *words) if isinstance(w, Tensor)), None)
    if device is not None and device.type == "cuda" and triton is not None:
        return _derive_seed_on_gpu([_as_tensor(word, device) for word in (seed, *words)])
    for word in (len(words), *words):
        first, second = _keys(seed, word, 0)
        seed = first << 31 ^ second
    return seed


def _as_tensor(word: Stream, device: torch.device) -> Tensor:
    if isinstance(word, Tensor):
        return word
    return torch.full((1,), word, dtype=torch.int64, device=device)


def _keys(seed: Stream, index: Any, stream: Stream) -> tuple[Any, Any]:
    """Return two independent 32-bit hashes of (seed, index, stream); integers of integers."""
    keys = []
    for salt in (1, 2):
        key: Any = (salt * _GOLDEN) & _MASK
        for word in (*_halves(seed), index, *_halves(stream)):
            key = _hash32((key * 5 + word + 1) & _MASK)
        keys.append(key)
    return keys[0], keys[1]


def _halves(number: Stream) -> tuple[Stream, Stream]:
    return number & _MASK, number >> 32 & _MASK


def _hash32(h: Any) -> Any:
    """Return a 32-bit integer hash, computed in int64 so that no product overflows."""
    h = (h ^ (h >> 16)) * 0x21F0AAAD & _MASK
    h = (h ^ (h >> 15)) * 0x735A2D97 & _MASK
    return h ^ (h >> 15)


if triton is not None:

    @triton.jit
    def _hash32_kernel(h):
        h = (h ^ (h >> 16)) * 0x21F0AAAD
        h = (h ^ (h >> 15)) * 0x735A2D97
        return h ^ (h >> 15)

    @triton.jit
    def _absorb(key, word):
        return _hash32_kernel(key * 5 + word.to(tl.uint32) + 1)

    @triton.jit
    def _key(salt, seed, index, stream):
        key = (tl.full((1,), 0x9E3779B9, tl.uint32) * salt).to(tl.uint32)
        key = _absorb(_absorb(key, seed), seed >> 32)
        key = _absorb(key, index)
        return _absorb(_absorb(key, stream), stream >> 32)

    @triton.jit
    def _uniform_kernel(out, index, seed, stream, count, size: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        position = tl.program_id(1) * size + tl.arange(0, size)
        s, i, t = tl.load(seed), tl.load(index + row), tl.load(stream)
        bits = _hash32_kernel(position.to(tl.uint32) * 0x9E3779B9 + _key(1, s, i, t))
        bits = _hash32_kernel(bits + _key(2, s, i, t))
        value = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)
        tl.store(out + row * count + position, value, mask=position < count)

    @triton.jit
    def _derived_kernel(out, words, count: tl.constexpr):
        zero = tl.full((1,), 0, tl.int64)
        key = tl.load(words + zero)
        for k in tl.static_range(count):
            word = tl.load(words + zero + k) if k else tl.full((1,), count - 1, tl.int64)
            first = _key(1, key, word, zero).to(tl.int64)
            second = _key(2, key, word, zero).to(tl.int64)
            key = (first << 31) ^ second
        tl.store(out + zero, key)


def _uniform_on_gpu(seed: Tensor, index: Tensor, stream: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    out = torch.empty(len(index), *shape, device=index.device)
    grid = (len(index), triton.cdiv(count, _BLOCK))
    _uniform_kernel[grid](out, index.contiguous(), seed, stream, count, _BLOCK)
    return out


def _derive_seed_on_gpu(words: Sequence[Tensor]) -> Tensor:
    packed = torch.cat([word.reshape(1) for word in words])
    out = torch.empty(1, dtype=torch.int64, device=packed.device)
    _derived_kernel[(1,)](out, packed, len(words))
    return out
