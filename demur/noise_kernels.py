"""The hash of `demur.noise` as GPU kernels: the same numbers, one launch instead of a hundred.

Written with Triton, which comes with torch wherever there is a GPU; without it `demur.noise` uses
its own tensor operations there too. Equality is checked by `demur bench --check`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import math
from collections.abc import Sequence

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch
    triton = None

BLOCK = 1024
AVAILABLE = triton is not None

if AVAILABLE:

    @triton.jit
    def _mixed(h):
        h = (h ^ (h >> 16)) * 0x21F0AAAD
        h = (h ^ (h >> 15)) * 0x735A2D97
        return h ^ (h >> 15)

    @triton.jit
    def _with(key, word):
        return _mixed(key * 5 + word.to(tl.uint32) + 1)

    @triton.jit
    def _keyed(salt, seed, index, stream):
        key = (tl.full((1,), 0x9E3779B9, tl.uint32) * salt).to(tl.uint32)
        key = _with(_with(key, seed), seed >> 32)
        key = _with(key, index)
        return _with(_with(key, stream), stream >> 32)

    @triton.jit
    def _uniform_kernel(out, index, seed, stream, count, size: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1) * size + tl.arange(0, size)
        s, i, t = tl.load(seed), tl.load(index + row), tl.load(stream)
        bits = _mixed(place.to(tl.uint32) * 0x9E3779B9 + _keyed(1, s, i, t))
        bits = _mixed(bits + _keyed(2, s, i, t))
        value = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)
        tl.store(out + row * count + place, value, mask=place < count)

    @triton.jit
    def _derived_kernel(out, words, count: tl.constexpr):
        zero = tl.full((1,), 0, tl.int64)
        key = tl.load(words + zero)
        for k in tl.static_range(count):
            word = tl.load(words + zero + k) if k else tl.full((1,), count - 1, tl.int64)
            first = _keyed(1, key, word, zero).to(tl.int64)
            second = _keyed(2, key, word, zero).to(tl.int64)
            key = (first << 31) ^ second
        tl.store(out + zero, key)


def uniform(seed: Tensor, index: Tensor, stream: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As `demur.noise.uniform`, with everything on the GPU."""
    count = math.prod(shape)
    out = torch.empty(len(index), *shape, device=index.device)
    grid = (len(index), triton.cdiv(count, BLOCK))
    _uniform_kernel[grid](out, index.contiguous(), seed, stream, count, BLOCK)
    return out


def derived(words: Sequence[Tensor]) -> Tensor:
    """As `demur.noise.derived` of a seed and words, each held on the GPU."""
    packed = torch.cat([word.reshape(1) for word in words])
    out = torch.empty(1, dtype=torch.int64, device=packed.device)
    _derived_kernel[(1,)](out, packed, len(words))
    return out
