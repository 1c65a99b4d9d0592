"""Batch norm with ReLU, and the residual sum before it, as GPU kernels for crafting.

Train mode reads the maps twice forwards and twice backwards, which is the least it can; a general
compiler needs about three times as long. Maps are N, C, H, W with channels last: rows of C.
Statistics are sums of the distance to the first row, a point among the data: little cancels.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch
    triton = None

AVAILABLE = triton is not None
SCALE, SHIFT, MEAN, SPREAD = range(4)  # rows of what a norm remembers between its kernels

if AVAILABLE:

    @triton.jit
    def _place(first, channels, count, tall: tl.constexpr, wide: tl.constexpr):
        """Offsets of a tile of rows and channels, and which of them exist."""
        rows = first + tl.arange(0, tall)
        columns = tl.program_id(1) * wide + tl.arange(0, wide)
        there = (rows < count)[:, None] & (columns < channels)[None, :]
        return rows[:, None].to(tl.int64) * channels + columns[None, :], there

    @triton.jit
    def sums_kernel(
        a, b, total, sums, count, channels,
        span: tl.constexpr, add: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        """Write a + b, if there is a b, and add up its first and second powers by channel."""
        column = tl.program_id(1) * wide + tl.arange(0, wide)
        inside = column < channels
        point = tl.load(a + column, mask=inside, other=0.0)
        if add:
            more = tl.load(b + column, mask=inside, other=0.0)
            point = (point.to(tl.float32) + more.to(tl.float32)).to(point.dtype)
        point = point.to(tl.float32)
        first = tl.zeros((tall, wide), tl.float32)
        second = tl.zeros((tall, wide), tl.float32)
        for step in range(0, span, tall):
            at, there = _place(tl.program_id(0) * span + step, channels, count, tall, wide)
            x = tl.load(a + at, mask=there, other=0.0)
            if add:
                y = tl.load(b + at, mask=there, other=0.0)
                x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
                tl.store(total + at, x, mask=there)
            away = tl.where(there, x.to(tl.float32) - point[None, :], 0.0)
            first += away
            second += away * away
        tl.atomic_add(sums + column, tl.sum(first, 0), mask=inside)
        tl.atomic_add(sums + channels + column, tl.sum(second, 0), mask=inside)

    @triton.jit
    def normalise_kernel(
        x, out, sums, weight, bias, running_mean, running_var, kept, count, channels,
        momentum, eps, tall: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        """ReLU of the normalised maps; the first row of programs keeps the statistics."""
        column = tl.program_id(1) * wide + tl.arange(0, wide)
        inside = column < channels
        first = tl.load(sums + column, mask=inside, other=0.0) / count
        second = tl.load(sums + channels + column, mask=inside, other=0.0) / count
        mean = first + tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        variance = tl.maximum(second - first * first, 0.0)
        spread = 1.0 / tl.sqrt(variance + eps)
        scale = tl.load(weight + column, mask=inside, other=0.0) * spread
        shift = tl.load(bias + column, mask=inside, other=0.0) - mean * scale
        if tl.program_id(0) == 0:
            tl.store(kept + column, scale, mask=inside)
            tl.store(kept + channels + column, shift, mask=inside)
            tl.store(kept + 2 * channels + column, mean, mask=inside)
            tl.store(kept + 3 * channels + column, spread, mask=inside)
            old = tl.load(running_mean + column, mask=inside, other=0.0)
            tl.store(running_mean + column, old + momentum * (mean - old), mask=inside)
            old = tl.load(running_var + column, mask=inside, other=0.0)
            new = variance * (count / (count - 1.0))
            tl.store(running_var + column, old + momentum * (new - old), mask=inside)
        at, there = _place(tl.program_id(0) * tall, channels, count, tall, wide)
        held = tl.load(x + at, mask=there, other=0.0)
        value = held.to(tl.float32) * scale[None, :] + shift[None, :]
        tl.store(out + at, tl.maximum(value, 0.0).to(held.dtype), mask=there)

    @triton.jit
    def affine_kernel(
        a, b, total, out, kept, count, channels,
        add: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        """ReLU of a + b scaled and shifted; the sum is written too, if there is a b."""
        column = tl.program_id(1) * wide + tl.arange(0, wide)
        inside = column < channels
        scale = tl.load(kept + column, mask=inside, other=0.0)
        shift = tl.load(kept + channels + column, mask=inside, other=0.0)
        at, there = _place(tl.program_id(0) * tall, channels, count, tall, wide)
        x = tl.load(a + at, mask=there, other=0.0)
        if add:
            y = tl.load(b + at, mask=there, other=0.0)
            x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
            tl.store(total + at, x, mask=there)
        value = x.to(tl.float32) * scale[None, :] + shift[None, :]
        tl.store(out + at, tl.maximum(value, 0.0).to(x.dtype), mask=there)

    @triton.jit
    def grad_sums_kernel(
        grad, x, kept, sums, count, channels,
        span: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        """Add up, by channel, the gradient behind the ReLU and its product with the norm."""
        column = tl.program_id(1) * wide + tl.arange(0, wide)
        inside = column < channels
        scale = tl.load(kept + column, mask=inside, other=0.0)
        shift = tl.load(kept + channels + column, mask=inside, other=0.0)
        mean = tl.load(kept + 2 * channels + column, mask=inside, other=0.0)
        spread = tl.load(kept + 3 * channels + column, mask=inside, other=0.0)
        first = tl.zeros((tall, wide), tl.float32)
        second = tl.zeros((tall, wide), tl.float32)
        for step in range(0, span, tall):
            at, there = _place(tl.program_id(0) * span + step, channels, count, tall, wide)
            held = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            given = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
            live = held * scale[None, :] + shift[None, :] > 0
            given = tl.where(live & there, given, 0.0)
            first += given
            second += given * (held - mean[None, :])
        tl.atomic_add(sums + column, tl.sum(first, 0), mask=inside)
        tl.atomic_add(sums + channels + column, tl.sum(second, 0) * spread, mask=inside)

    @triton.jit
    def grad_kernel(
        grad, x, beside, out, kept, sums, count, channels,
        add: tl.constexpr, train: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
    ):  # fmt: skip
        """The gradient before the norm, plus the one that came past it, if there is one."""
        column = tl.program_id(1) * wide + tl.arange(0, wide)
        inside = column < channels
        scale = tl.load(kept + column, mask=inside, other=0.0)
        shift = tl.load(kept + channels + column, mask=inside, other=0.0)
        at, there = _place(tl.program_id(0) * tall, channels, count, tall, wide)
        held = tl.load(x + at, mask=there, other=0.0)
        value = held.to(tl.float32)
        given = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        given = tl.where(value * scale[None, :] + shift[None, :] > 0, given, 0.0)
        if train:
            mean = tl.load(kept + 2 * channels + column, mask=inside, other=0.0)
            spread = tl.load(kept + 3 * channels + column, mask=inside, other=0.0)
            first = tl.load(sums + column, mask=inside, other=0.0) / count
            second = tl.load(sums + channels + column, mask=inside, other=0.0) / count
            normal = (value - mean[None, :]) * spread[None, :]
            given = given - first[None, :] - normal * second[None, :]
        given = given * scale[None, :]
        if add:
            given += tl.load(beside + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out + at, given.to(held.dtype), mask=there)
