"""Triton kernels for `demur.noise`: the same numbers in one launch instead of about a hundred.

CUDA builds of torch include Triton. Without it `demur.noise` uses tensor operations on the GPU
too. `demur bench --check` tests that both give equal numbers.
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
except ImportError:  # a CPU build of torch
    triton = None

BLOCK = 1024
AVAILABLE = triton is not None

if AVAILABLE:

    @triton.jit
    def _hash32(h):
        h = (h ^ (h >> 16)) * 0x21F0AAAD
        h = (h ^ (h >> 15)) * 0x735A2D97
        return h ^ (h >> 15)

    @triton.jit
    def _absorb(key, word):
        return _hash32(key * 5 + word.to(tl.uint32) + 1)

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
        bits = _hash32(position.to(tl.uint32) * 0x9E3779B9 + _key(1, s, i, t))
        bits = _hash32(bits + _key(2, s, i, t))
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


def uniform(seed: Tensor, index: Tensor, stream: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of `demur.noise.uniform`; every argument is on the GPU."""
    count = math.prod(shape)
    out = torch.empty(len(index), *shape, device=index.device)
    grid = (len(index), triton.cdiv(count, BLOCK))
    _uniform_kernel[grid](out, index.contiguous(), seed, stream, count, BLOCK)
    return out


def derive_seed(words: Sequence[Tensor]) -> Tensor:
    """Return `demur.noise.derive_seed` of a seed and further words, all on the GPU."""
    packed = torch.cat([word.reshape(1) for word in words])
    out = torch.empty(1, dtype=torch.int64, device=packed.device)
    _derived_kernel[(1,)](out, packed, len(words))
    return out
