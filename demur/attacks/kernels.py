"""Triton kernels for a step of Square, FAB and MaxMinMargin, one launch each.

    if kernels.square_fits(x):
        proposal = kernels.propose_square(x, x_adv, uniforms, side, eps)

They replace 35 to 400 small tensor operations by the same formulas. CUDA builds of torch include
Triton. Without it, for other dtypes, and for images too large for the registers of a GPU, the
attacks use tensor operations.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import math

import torch
from torch import Tensor

from demur.attacks.balls import L2, Ball, Linf
from demur.images import memory_format

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

AVAILABLE = triton is not None
BLOCK = 1024  # pixel values of a program of Square
MAX_ELEMENTS = 16384  # pixels (times margins), rounded up to powers of two; they are registers
FEW_ELEMENTS = 4096  # up to which 8 warps hold an image


def square_fits(*tensors: Tensor) -> bool:
    """Return whether the kernels take these images and values: float32 on a GPU."""
    return AVAILABLE and all(part.is_cuda and part.dtype == torch.float32 for part in tensors)


def propose_square(x: Tensor, x_adv: Tensor, uniforms: Tensor, side: int, eps: float) -> Tensor:
    """Return the images with one more square, projected into the Linf ball.

    `uniforms` are the random numbers of the query, N, 5 + C, see `SquareDraw`.
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


def update_square(
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    proposal: Tensor,
    value: Tensor,
    candidate: Tensor,
    first: bool,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, values and candidates after a query; see `SquareState.update`.

    `state` holds images, values, candidates (bool) and refuted (bool) before the query.
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


def hyperplane_fits(ball: Ball, grad: Tensor) -> bool:
    """Return whether the kernel can project with this ball and gradients of this shape."""
    few = math.prod(grad.shape[1:]) <= MAX_ELEMENTS
    return few and type(ball) in (Linf, L2) and square_fits(grad)


def project_image(x: Tensor, grad: Tensor, rise: Tensor, euclidean: bool) -> Tensor:
    """Return the smallest perturbation within [0, 1] that raises a linear function by `rise` (N).

    Each program holds one image in registers and runs `newton_time` of FAB to its end. `euclidean`:
    the norm is L2, not Linf.
    """
    layout = memory_format(x)  # the order of the pixels does not matter
    x, grad = (part.contiguous(memory_format=layout) for part in (x, grad))
    pixels, delta = x[0].numel(), torch.empty_like(x)
    size = triton.next_power_of_2(pixels)
    warps = 8 if size <= FEW_ELEMENTS else 16
    _project_kernel[(len(x),)](
        x, grad, rise.contiguous(), delta, pixels, euclidean, size, num_warps=warps
    )
    return delta


def game_fits(grads: Tensor) -> bool:
    """Return whether the kernel can play games with these gradients, N, M, D."""
    _, margins, pixels = grads.shape
    elements = (1 << (pixels - 1).bit_length()) * (1 << (margins - 1).bit_length())
    return elements <= MAX_ELEMENTS and square_fits(grads)


def play_game(
    x: Tensor,
    start: Tensor,
    values: Tensor,
    grads: Tensor,
    weights: Tensor,
    games: Tensor,
    eps: float,
    euclidean: bool,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """Return the average response of the image and the weights after some rounds.

    `start` are the iterates at which the margins are linearised, with `values` (N, M) and `grads`
    (N, M, D); `weights` (N, M) are those of the margins, and `games` (N) the numbers of earlier
    games.
    """
    n, margins, pixels = grads.shape
    tensors = [part.contiguous() for part in (x, start, values, grads, weights, games)]
    average, new_weights = torch.empty_like(tensors[1]), torch.empty_like(tensors[4])
    columns = triton.next_power_of_2(pixels)
    _game_kernel[(n,)](
        *tensors, average, new_weights, pixels, margins, eps, rounds,
        euclidean, triton.next_power_of_2(margins), columns, num_warps=8,
    )  # fmt: skip
    return average, new_weights


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

    @triton.jit
    def _project_kernel(
        x, grads, rises, delta, pixels, euclidean: tl.constexpr, size: tl.constexpr
    ):
        """Project one image; the formulas of `project_to_hyperplane` and `newton_time`."""
        image = tl.program_id(0).to(tl.int64)
        position = tl.arange(0, size)
        known = position < pixels
        pixel = tl.load(x + image * pixels + position, mask=known, other=0.0)
        grad = tl.load(grads + image * pixels + position, mask=known, other=0.0)
        rise = tl.load(rises + image)
        toward = grad * (tl.where(rise > 0, 1.0, 0.0) - tl.where(rise < 0, 1.0, 0.0))
        slack = tl.where(toward > 0, 1.0 - pixel, pixel)
        if euclidean:
            speed = tl.abs(grad) / (tl.sqrt(tl.sum(grad * grad, 0)) + 1e-10)
        else:
            speed = tl.where(grad != 0, 1.0, 0.0)
        gain = tl.abs(toward) * speed
        stop_time = tl.where(gain > 0, slack / tl.maximum(speed, 1e-12), 0.0)
        gain_at_stop, needed = gain * stop_time, tl.abs(rise)
        last = tl.max(stop_time, 0)
        time = last * 0.0
        count = tl.sum(tl.where(stop_time > time, 1, 0), 0)
        before = count + 1
        while count < before:  # the number of moving pixels falls until the solution is reached
            stopped_gain = tl.sum(tl.where(stop_time > time, 0.0, gain_at_stop), 0)
            moving_gain = tl.sum(tl.where(stop_time > time, gain, 0.0), 0)
            reached = (needed - stopped_gain) / tl.maximum(moving_gain, 1e-37)
            time = tl.maximum(time, tl.minimum(reached, last))
            before = count
            count = tl.sum(tl.where(stop_time > time, 1, 0), 0)
        sign = tl.where(toward > 0, 1.0, 0.0) - tl.where(toward < 0, 1.0, 0.0)
        moved = sign * tl.minimum(slack, time * speed)
        tl.store(delta + image * pixels + position, moved, mask=known)

    @triton.jit
    def _game_kernel(
        x, start, values, grads, weights, games, average_out, weights_out,
        pixels, margins, eps, rounds,
        euclidean: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    ):  # fmt: skip
        """Play the game of one image: fictitious play, as `solve_game` describes it."""
        image = tl.program_id(0).to(tl.int64)
        column, row = tl.arange(0, columns), tl.arange(0, rows)
        inside, known = column < pixels, row < margins
        clean = tl.load(x + image * pixels + column, mask=inside, other=0.0)
        first = tl.load(start + image * pixels + column, mask=inside, other=0.0)
        offsets = image * margins * pixels + row[:, None] * pixels + column[None, :]
        grad = tl.load(grads + offsets, mask=known[:, None] & inside[None, :], other=0.0)
        value = tl.load(values + image * margins + row, mask=known, other=float("inf"))
        weight = tl.load(weights + image * margins + row, mask=known, other=0.0)
        earlier = rounds * tl.load(games + image)
        average = first
        for turn in range(rounds):
            rate = 2.0 / (turn + 2 + earlier)
            direction = tl.sum(weight[:, None] * grad, 0)
            if euclidean:
                norm = tl.sqrt(tl.sum(direction * direction, 0))
                response = clean + eps * direction / (norm + 1e-10)
                response = tl.minimum(tl.maximum(response, 0.0), 1.0)
            else:
                sign = tl.where(direction > 0, 1.0, 0.0) - tl.where(direction < 0, 1.0, 0.0)
                low = tl.minimum(tl.maximum(clean - eps, 0.0), 1.0)
                high = tl.minimum(tl.maximum(clean + eps, 0.0), 1.0)
                response = tl.minimum(tl.maximum(clean + eps * sign, low), high)
            average += rate * (response - average)
            predicted = value + tl.sum(grad * (average - first)[None, :], 1)
            smallest = tl.where(row == tl.argmin(predicted, 0), 1.0, 0.0)
            weight += rate * (smallest - weight)
        tl.store(average_out + image * pixels + column, average, mask=inside)
        tl.store(weights_out + image * margins + row, weight, mask=known)
