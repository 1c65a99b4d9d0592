"""Triton kernels for `demur.attacks.square`: a Linf query proposes and updates in one launch each.

    if square_kernels.fits(x): proposal = square_kernels.propose(x, x_adv, uniforms, side, eps)

They replace about 35 small tensor operations per query and compute the same numbers. Without
Triton, which CUDA builds of torch include, and for other dtypes Square uses tensor operations.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
from torch import Tensor

from demur.images import memory_format

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

AVAILABLE = triton is not None
BLOCK = 1024  # pixel values of a program


def fits(*tensors: Tensor) -> bool:
    """Return whether the kernels take these images and values: float32 on a GPU."""
    return AVAILABLE and all(part.is_cuda and part.dtype == torch.float32 for part in tensors)


def propose(x: Tensor, x_adv: Tensor, uniforms: Tensor, side: int, eps: float) -> Tensor:
    """Return the images with one more square, projected into the Linf ball.

    Args:
        x: Clean images, N, C, H, W.
        x_adv: The current images.
        uniforms: The random numbers of the query, N, 5 + C, see `SquareDraw`.
        side: The side of the square in pixels.
        eps: The radius of the ball.
    """
    layout = memory_format(x)
    x, x_adv = (part.contiguous(memory_format=layout) for part in (x, x_adv))
    count, channels, height, width = x.shape
    values = channels * height * width
    out, grid = torch.empty_like(x), (count, triton.cdiv(values, BLOCK))
    _propose_kernel[grid](
        x, x_adv, uniforms, out, uniforms.stride(0), uniforms.stride(1),
        values, channels, height, width, side, float(eps), 2.0 * eps,
        layout == torch.channels_last, BLOCK,
    )  # fmt: skip
    return out


def update(
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    proposal: Tensor,
    value: Tensor,
    candidate: Tensor,
    first: bool,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, values and candidates after a query; see `SquareState.update`.

    Args:
        state: Images, values, candidates (bool) and refuted (bool) before the query.
        proposal: The images of the query.
        value: Their values, N.
        candidate: Whether they are candidate successes, N, bool.
        first: Whether this is the first query, whose proposals are always taken.
        exact: Whether a candidate counts as better than any value.
    """
    layout = memory_format(proposal)
    x_adv, proposal = (part.contiguous(memory_format=layout) for part in (state[0], proposal))
    before, candidates = (part.contiguous() for part in state[1:3])
    flags = [part.contiguous().view(torch.uint8) for part in (candidates, state[3], candidate)]
    new = torch.empty_like(x_adv), torch.empty_like(before), torch.empty_like(candidates)
    values = x_adv[0].numel()
    grid = (len(x_adv), triton.cdiv(values, BLOCK))
    _update_kernel[grid](
        x_adv, before, *flags, proposal, value.contiguous(),
        new[0], new[1], new[2].view(torch.uint8), values, first, exact, BLOCK,
    )  # fmt: skip
    return new


if AVAILABLE:

    @triton.jit(do_not_specialize=("side",))
    def _propose_kernel(
        x, x_adv, uniforms, out, image_stride, number_stride,
        values, channels, height, width, side, eps, step,
        channels_last: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        """Copy a block of an image and add the square; the formulas of `Square._propose`."""
        image = tl.program_id(0).to(tl.int64)
        position = tl.program_id(1) * size + tl.arange(0, size)
        known = position < values
        numbers = uniforms + image * image_stride
        lowest, leftmost = height - side, width - side
        top = (tl.load(numbers) * (lowest + 1).to(tl.float32)).to(tl.int32)
        left = (tl.load(numbers + number_stride) * (leftmost + 1).to(tl.float32)).to(tl.int32)
        top, left = tl.minimum(top, lowest), tl.minimum(left, leftmost)
        if channels_last:
            channel, pixel = position % channels, position // channels
        else:
            channel, pixel = position // (height * width), position % (height * width)
        row, column = pixel // width - top, pixel % width - left
        inside = known & (row >= 0) & (row < side) & (column >= 0) & (column < side)
        sign = tl.load(numbers + (5 + channel) * number_stride, mask=inside, other=0.0)
        clean = tl.load(x + image * values + position, mask=inside, other=0.0)
        current = tl.load(x_adv + image * values + position, mask=known, other=0.0)
        moved = current + tl.where(sign < 0.5, -step, step)
        low = tl.minimum(tl.maximum(clean - eps, 0.0), 1.0)
        high = tl.minimum(tl.maximum(clean + eps, 0.0), 1.0)
        moved = tl.minimum(tl.maximum(moved, low), high)
        tl.store(out + image * values + position, tl.where(inside, moved, current), mask=known)

    @triton.jit
    def _update_kernel(
        x_adv, before, candidates, refuted, candidate, proposal, value,
        x_out, value_out, candidate_out, values,
        first: tl.constexpr, exact: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        """Take or leave the proposal of one image; the formulas of `SquareState.update`."""
        image = tl.program_id(0).to(tl.int64)
        position = tl.program_id(1) * size + tl.arange(0, size)
        known = position < values
        old_value, new_value = tl.load(before + image), tl.load(value + image)
        old_candidate = tl.load(candidates + image) != 0
        new_candidate = tl.load(candidate + image) != 0
        may_exchange = (tl.load(refuted + image) != 0) & new_candidate
        better = new_value > old_value
        if exact:
            better = better | new_candidate
        if first:
            better = better | (image >= 0)
        taken = better & ((old_candidate == 0) | may_exchange)
        offset = image * values + position
        new = tl.load(proposal + offset, mask=known & taken, other=0.0)
        old = tl.load(x_adv + offset, mask=known & (taken == 0), other=0.0)
        tl.store(x_out + offset, tl.where(taken, new, old), mask=known)
        if tl.program_id(1) == 0:
            tl.store(value_out + image, tl.where(taken, new_value, old_value))
            is_candidate = tl.where(taken, new_candidate, old_candidate)
            tl.store(candidate_out + image, is_candidate.to(tl.uint8))
