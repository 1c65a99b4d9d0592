"""A Triton kernel for `demur.attacks.fab.project_to_hyperplane`: one launch instead of a sort.

    if hyperplane_kernels.fits(ball, grad): delta = project(x, grad, rise, euclidean=False)

Each program holds one image in registers and runs `newton_time` to its end. CUDA builds of torch
include Triton. Without it, and for images too large for the registers, FAB sorts the pixels.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import math

import torch
from torch import Tensor

from demur.balls import L2, Ball, Linf
from demur.images import memory_format

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

AVAILABLE = triton is not None
MAX_ELEMENTS = 16384  # pixels, rounded up to a power of two; they are registers
FEW_ELEMENTS = 4096  # up to which 8 warps hold an image


def fits(ball: Ball, grad: Tensor) -> bool:
    """Return whether the kernel can project with this ball and gradients of this shape."""
    supported = grad.is_cuda and grad.dtype == torch.float32 and type(ball) in (Linf, L2)
    return AVAILABLE and supported and math.prod(grad.shape[1:]) <= MAX_ELEMENTS


def project(x: Tensor, grad: Tensor, rise: Tensor, euclidean: bool) -> Tensor:
    """Return the smallest perturbation within [0, 1] that raises a linear function by `rise`.

    Args:
        x: Images, N, C, H, W.
        grad: The gradient of the linear function, shape of x.
        rise: The required rise, N.
        euclidean: Whether the smallest perturbation is that of the L2 norm, not of Linf.
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


if AVAILABLE:

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
