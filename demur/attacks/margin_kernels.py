"""A Triton kernel for `demur.attacks.margins`: a whole game in one launch instead of about 400.

CUDA builds of torch include Triton. Without it, and for images too large for the registers of a
GPU, `solve_game` uses tensor operations. Both compute the same formulas up to rounding.
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
MAX_ELEMENTS = 16384  # pixels times margins, both rounded up to powers of two; they are registers


def fits(grads: Tensor) -> bool:
    """Return whether the kernel can play games with these gradients, N, M, D."""
    _, margins, pixels = grads.shape
    elements = (1 << (pixels - 1).bit_length()) * (1 << (margins - 1).bit_length())
    supported = grads.is_cuda and grads.dtype == torch.float32
    return AVAILABLE and supported and elements <= MAX_ELEMENTS


def play(
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

    Args:
        x: Clean images.
        start: The iterates at which the margins are linearised.
        values: Margins there, N, M.
        grads: Their gradients, N, M, D.
        weights: Weights of the margins, N, M.
        games: The number of earlier games, N.
        eps: The radius of the ball.
        euclidean: Whether the ball is L2, not Linf.
        rounds: The number of rounds.
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
