"""Linf, L2 and L1 balls around each image, intersected with the pixel range [0, 1]."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from demur import noise
from demur.errors import BadInput
from demur.images import per_image
from demur.noise import Stream
from demur.numerics import fused
from demur.spec import Spec
from demur.spec.field_types import NonNegative

RADIUS, CHOICE = 1, 2  # keys of independent random streams
ROUNDING = 1e-5  # by which a projected image may exceed its ball, relative to 1 + eps
MAX_EPS = 1e6  # exceeds the L2 diameter of any image; in float32 the squares of 1e20 are infinite
STEP_SHARE = 0.05  # of the pixels, which a step in the L1 ball moves


@dataclass(frozen=True)
class Ball(Spec, ABC):
    """The images within distance `eps` of x in some norm, with pixels in [0, 1].

    A ball provides what attacks need: random starts, the direction of steepest ascent, the
    projection and the norm. Images have shape N, C, H, W. Random starts depend on (seed, index,
    stream) only, where `index` (N) is the position of each image in its data set.
    """

    eps: NonNegative  # the radius, in units of pixel values

    @abstractmethod
    def start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """Return a random image of the ball around each x."""

    def scaled_start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """Return a start on the boundary of the ball, in a random direction (Auto-PGD)."""
        u = noise.normal(seed, index, stream, tuple(x.shape[1:])).to(x)
        size = per_image(self.norm(u), x)
        return self.project(x, x + self.eps * u / size.clamp_min(1e-12))

    def corner_start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """Return a start with a random sign for each pixel: a corner of the Linf ball."""
        u = noise.uniform(seed, index, stream, tuple(x.shape[1:])).to(x)
        return self.project(x, x + self.eps * self.direction(u - 0.5))

    def start_near(
        self, x: Tensor, size: float, seed: Stream, index: Tensor, stream: Stream
    ) -> Tensor:
        """Return x plus Gaussian noise of standard deviation `size`, projected (TRADES)."""
        noisy = x + size * noise.normal(seed, index, stream, tuple(x.shape[1:])).to(x)
        return self.project(x, noisy)

    def mixed_start(
        self, x: Tensor, seed: Stream, index: Tensor, stream: Stream, near: float, far: float
    ) -> Tensor:
        """Return Gaussian noise, a Gaussian direction at a uniform radius, or the image (CCAT).

        `near` and `far` are the probabilities of the first two. The noise has the standard
        deviation eps / (2 ln D) for D pixels.
        """
        # The reference code makes one choice for the whole batch. Here each image has its own,
        # so that its noise does not depend on the other images of the batch.
        shape, ones = tuple(x.shape[1:]), (1,) * (x.ndim - 1)
        direction = noise.normal(seed, index, stream, shape).to(x)
        choice = noise.uniform(seed, index, noise.derive_seed(stream, CHOICE), ones).to(x)
        share = noise.uniform(seed, index, noise.derive_seed(stream, RADIUS), ones).to(x)
        radius = self.eps * share / per_image(self.norm(direction), x).clamp_min(1e-12)
        factor = torch.where(choice < near, self.eps / (2 * math.log(max(x[0].numel(), 2))), radius)
        return self.project(x, x + torch.where(choice < near + far, factor, 0) * direction)

    @abstractmethod
    def direction(self, grad: Tensor) -> Tensor:
        """Return the steepest ascent direction of unit norm, shape of grad."""

    @abstractmethod
    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Return x_adv projected into the ball around x and into [0, 1]."""

    @abstractmethod
    def norm(self, delta: Tensor) -> Tensor:
        """Return the norm of each perturbation, N."""

    def farthest(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the image of the ball that a linear function with this gradient makes largest."""
        return self.project(x, x + self.eps * self.direction(grad))

    def contains(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Return whether each x_adv lies in the ball around x and in [0, 1], up to rounding, N."""
        near = self.norm(x_adv - x) <= self.eps + ROUNDING * (1 + self.eps)
        return near & in_pixel_range(x_adv)

    @fused
    def step(self, x: Tensor, x_adv: Tensor, grad: Tensor, length: float) -> Tensor:
        """Return x_adv after one projected gradient ascent step of size `length`."""
        return self.project(x, x_adv + length * self.direction(grad))


@dataclass(frozen=True)
class Linf(Ball):
    """The Linf ball: every pixel changes by at most eps.

    Args:
        eps: The largest change of a pixel value in [0, 1], for instance 8/255.

    Example:
        >>> import torch
        >>> from demur import Linf
        >>> x = torch.full((1, 3, 2, 2), 0.5)
        >>> x_adv = Linf(8 / 255).project(x, x + 1)
        >>> assert torch.allclose(x_adv, x + 8 / 255)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps > 1:
            raise BadInput(
                f"eps={self.eps:g} exceeds the pixel range [0, 1]; write eps={self.eps:g}/255 if "
                "you count in levels of 0 to 255"
            )

    def start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        u = noise.uniform(seed, index, stream, tuple(x.shape[1:])).to(x)
        return self.project(x, x + self.eps * (2 * u - 1))

    def scaled_start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        # The reference code of Auto-PGD draws from the cube, not from a Gaussian, for Linf.
        u = 2 * noise.uniform(seed, index, stream, tuple(x.shape[1:])).to(x) - 1
        size = per_image(self.norm(u), x)
        return self.project(x, x + self.eps * u / size.clamp_min(1e-12))

    def direction(self, grad: Tensor) -> Tensor:
        return grad.sign()

    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        low, high = (x - self.eps).clamp(0, 1), (x + self.eps).clamp(0, 1)
        return x_adv.clamp(low, high)

    def norm(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().amax(1)


@dataclass(frozen=True)
class L2(Ball):
    """The L2 ball: the perturbation of an image has Euclidean norm at most eps.

    Args:
        eps: The radius in units of pixel values in [0, 1], for instance 0.5.

    Example:
        >>> import torch
        >>> from demur import L2
        >>> x = torch.full((1, 3, 2, 2), 0.5)
        >>> x_adv = L2(0.5).project(x, x + 1)
        >>> assert torch.allclose(L2(0.5).norm(x_adv - x), torch.tensor(0.5))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_radius(self.eps, "the square root of the number of pixels")

    def start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        # As in the reference code the radius is eps * U(0, 1), so the density is highest at the
        # centre; the start is not uniform in volume.
        shape = tuple(x.shape[1:])
        direction = self.direction(noise.normal(seed, index, stream, shape).to(x))
        radius_stream = noise.derive_seed(stream, RADIUS)
        radius = noise.uniform(seed, index, radius_stream, (1,) * len(shape)).to(x)
        return self.project(x, x + self.eps * radius * direction)

    def direction(self, grad: Tensor) -> Tensor:
        return grad / (_l2_norm(grad) + 1e-10)

    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        # Clamping to [0, 1] after the rescaling only shortens the perturbation further.
        delta = x_adv - x
        shrink = (self.eps / _l2_norm(delta).clamp_min(1e-12)).clamp(max=1)
        return (x + delta * shrink).clamp(0, 1)

    def norm(self, delta: Tensor) -> Tensor:
        return _l2_norm(delta).flatten()


@dataclass(frozen=True)
class L1(Ball):
    """The L1 ball: the absolute changes of all pixels of an image sum to at most eps.

    Projection and steps are those of the ball within [0, 1] (Croce and Hein, "Mind the box",
    2021), which is much smaller than the ball alone.

    Args:
        eps: The radius in units of pixel values in [0, 1], for instance 12.

    Example:
        >>> import torch
        >>> from demur import L1
        >>> x = torch.full((1, 3, 2, 2), 0.5)
        >>> x_adv = L1(3).project(x, x + 1)
        >>> assert torch.allclose(L1(3).norm(x_adv - x), torch.tensor(3.0))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_radius(self.eps, "the number of pixels")

    def start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        # As in the reference code: Gaussian noise of the whole space, projected.
        return self.project(x, x + noise.normal(seed, index, stream, tuple(x.shape[1:])).to(x))

    def scaled_start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        return self.start(x, seed, index, stream)

    def direction(self, grad: Tensor) -> Tensor:
        return self.sparse_direction(grad, grad.new_zeros(len(grad)))

    def sparse_direction(self, grad: Tensor, share: Tensor) -> Tensor:
        """Return equal steps along the largest entries of a gradient, together of unit norm.

        `share` is that of the pixels that move, N; at least one pixel does.
        """
        size = grad.abs().flatten(1)
        ascending, pixels = size.sort(1).values, size.shape[1]
        last = ((1 - share) * pixels).long().clamp(0, pixels - 1)
        signs = grad.sign() * (grad.abs() >= per_image(ascending.gather(1, last[:, None]), grad))
        return signs / per_image(self.norm(signs), grad).clamp_min(1)

    def step(self, x: Tensor, x_adv: Tensor, grad: Tensor, length: float) -> Tensor:
        blocked = torch.where(grad > 0, x_adv >= 1, x_adv <= 0)  # these pixels cannot move
        share = grad.new_full((len(grad),), STEP_SHARE)
        direction = self.sparse_direction(grad.masked_fill(blocked, 0), share)
        return self.project(x, x_adv + length * direction)

    def farthest(self, x: Tensor, grad: Tensor) -> Tensor:
        room = _room(x, grad)
        budget = x.new_full((len(x), 1), self.eps)
        return x + grad.sign() * in_order(grad.abs(), room, torch.ones_like(room), budget)

    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        # The projection lowers all changes by one number and clips them to [0, room]. The sum of
        # the clipped changes is piecewise linear in that number; a sort of its knots gives it.
        delta = x_adv - x
        change = delta.abs().flatten(1)
        room = change.minimum(_room(x, delta).flatten(1))
        knots, order = torch.cat((change - room, change), 1).sort(1)
        moving = torch.where(order < change.shape[1], 1.0, -1.0).to(x).cumsum(1)
        passed = (moving * (knots.roll(-1, 1) - knots))[:, :-1].cumsum(1)
        excess = room.sum(1, keepdim=True) - self.eps
        last = (passed < excess).sum(1, keepdim=True).clamp(max=knots.shape[1] - 2)
        before = torch.cat((torch.zeros_like(excess), passed), 1).gather(1, last)
        lower = knots.gather(1, last) + (excess - before) / moving.gather(1, last).clamp_min(1)
        change = (change - lower.where(excess > 0, 0)).clamp_min(0).minimum(room)
        change = change * (self.eps / change.sum(1, keepdim=True).clamp_min(1e-12)).clamp(max=1)
        return (x + delta.sign() * change.view_as(x)).clamp(0, 1)

    def norm(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().sum(1)


BALLS: dict[str, type[Ball]] = {"Linf": Linf, "L2": L2, "L1": L1}


def ball_by_name(norm: str, eps: float) -> Ball:
    """Return the ball of the norm "Linf", "L2" or "L1"; raise BadInput for another name."""
    if norm not in BALLS:
        raise BadInput(f"norm must be Linf, L2 or L1, not {norm!r}")
    return BALLS[norm](eps)


def in_order(rank: Tensor, most: Tensor, cost: Tensor, budget: Tensor) -> Tensor:
    """Return changes of pixels that use a budget (N, 1), the pixel of the largest rank first.

    Each pixel up to the last one changes by `most`; a change costs `cost` per unit.
    """
    order = rank.flatten(1).argsort(1, descending=True)
    most_sorted = most.flatten(1).gather(1, order)
    cost_sorted = cost.flatten(1).gather(1, order)
    used = (most_sorted * cost_sorted).cumsum(1) - most_sorted * cost_sorted  # by pixels before
    left = (budget - used).clamp_min(0) / cost_sorted.clamp_min(torch.finfo(cost.dtype).tiny)
    changes = most_sorted.minimum(left) * (cost_sorted > 0)
    return torch.zeros_like(changes).scatter(1, order, changes).view_as(most)


def _room(x: Tensor, delta: Tensor) -> Tensor:
    """Return how far each pixel can move within [0, 1] in the direction of delta."""
    return torch.where(delta > 0, 1 - x, x)


def _check_radius(eps: float, enough: str) -> None:
    if eps > MAX_EPS:
        raise BadInput(
            f"eps={eps:g} is too large; a ball of the radius {enough} contains every image"
        )


def in_pixel_range(x: Tensor) -> Tensor:
    """Return whether all pixels of each image lie in [0, 1], N; false for NaN."""
    pixels = x.flatten(1)
    return (pixels.amin(1) >= 0) & (pixels.amax(1) <= 1)


def _l2_norm(delta: Tensor) -> Tensor:
    """Return Euclidean norms, shaped to broadcast over images."""
    norm: Tensor = delta.flatten(1).norm(dim=1)
    return per_image(norm, delta)
