"""A Triton kernel for the game of MaxMinMargin, one launch in place of 400 tensor operations.

CUDA builds of torch include Triton. Without it, for other dtypes, and for images too large for the
registers of a GPU, the attack uses tensor operations.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

AVAILABLE = triton is not None
MAX_ELEMENTS = 16384  # pixels times margins, rounded up to powers of two; they are registers


def game_fits(grads: Tensor) -> bool:
    """Return whether the kernel can play games with these gradients, N, M, D."""
    _, margins, pixels = grads.shape
    elements = (1 << (pixels - 1).bit_length()) * (1 << (margins - 1).bit_length())
    on_gpu = AVAILABLE and grads.is_cuda and grads.dtype == torch.float32
    return on_gpu and elements <= MAX_ELEMENTS


def play_game(
    x: Tensor, start: Tensor, values: Tensor, grads: Tensor, weights: Tensor, games: Tensor,
    eps: float, euclidean: bool, rounds: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
