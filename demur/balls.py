"""The sets an attacker may choose from: Linf and L2 balls cut by the pixel range [0, 1].

ball = Linf(8/255)
x_adv = ball.start(x, noise_seed, index, stream)
x_adv = ball.step(x, x_adv, grad, 2/255)     # ascend, then back into the ball and the box
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from demur import noise
from demur.field_types import NonNegative
from demur.fused import fused
from demur.images import per_image
from demur.noise import Stream
from demur.spec import Spec

RADIUS, LOT = 1, 2  # purposes of random numbers


@dataclass(frozen=True)
class Ball(Spec, ABC):
    """All images within `eps` of x in some norm."""

    eps: NonNegative

    @abstractmethod
    def start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """A random image in the ball around each x."""

    def scaled_start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """A random change stretched until it touches the ball's border."""
        u = noise.normal(seed, index, stream, tuple(x.shape[1:])).to(x)
        size = per_image(self.size(u), x)
        return self.project(x, x + self.eps * u / size.clamp_min(1e-12))

    def corner(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """Every pixel at one end, by a coin, then back into the ball."""
        u = noise.uniform(seed, index, stream, tuple(x.shape[1:])).to(x)
        return self.project(x, x + self.eps * self.direction(u - 0.5))

    def nearby(self, x: Tensor, size: float, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """A little normal noise, back in the ball."""
        noisy = x + size * noise.normal(seed, index, stream, tuple(x.shape[1:])).to(x)
        return self.project(x, noisy)

    def mixed(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """One of three by lot: a little normal noise, a normal direction, the image itself.

        The first has a deviation of eps / (2 ln D) in each of D pixels; the second any share of
        the radius.
        """
        # reference code: one lot for the whole batch; here each image draws its own, since noise
        # depends on the image and not on its company
        away, lot = self._drawn(x, seed, index, stream)
        little = self.eps / (2 * math.log(max(x[0].numel(), 2)))
        size = torch.where(lot < 1 / 3, little, self._share(away, seed, index, stream))
        return self.project(x, x + torch.where(lot < 2 / 3, size, 0) * away)

    def ray_or_none(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """By a coin, a normal direction to any share of the radius, or the image itself."""
        away, lot = self._drawn(x, seed, index, stream)
        size = self._share(away, seed, index, stream)
        return self.project(x, x + torch.where(lot < 1 / 2, size, 0) * away)

    def _drawn(
        self, x: Tensor, seed: Stream, index: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor]:
        """A normal direction for each image, and a lot in [0, 1)."""
        shape = tuple(x.shape[1:])
        away = noise.normal(seed, index, stream, shape).to(x)
        apart = noise.derived(stream, LOT)
        return away, noise.uniform(seed, index, apart, (1,) * len(shape)).to(x)

    def _share(self, away: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """The factor that brings each direction to a uniform share of the radius."""
        ones = (1,) * (away.ndim - 1)
        share = noise.uniform(seed, index, noise.derived(stream, RADIUS), ones).to(away)
        return self.eps * share / per_image(self.size(away), away).clamp_min(1e-12)

    @abstractmethod
    def direction(self, grad: Tensor) -> Tensor:
        """The steepest ascent direction of unit size."""

    @abstractmethod
    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """x_adv brought back into the ball around x and into [0, 1]."""

    @abstractmethod
    def size(self, delta: Tensor) -> Tensor:
        """The norm of each perturbation."""

    @fused
    def step(self, x: Tensor, x_adv: Tensor, grad: Tensor, length: float) -> Tensor:
        """x_adv after one projected ascent step."""
        return self.project(x, x_adv + length * self.direction(grad))


@dataclass(frozen=True)
class Linf(Ball):
    """Every pixel may change by eps."""

    def start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """Uniform in the ball."""
        u = noise.uniform(seed, index, stream, tuple(x.shape[1:])).to(x)
        return self.project(x, x + self.eps * (2 * u - 1))

    def scaled_start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """Uniform in the cube, then stretched until one pixel reaches the border."""
        u = 2 * noise.uniform(seed, index, stream, tuple(x.shape[1:])).to(x) - 1
        size = per_image(self.size(u), x)
        return self.project(x, x + self.eps * u / size.clamp_min(1e-12))

    def direction(self, grad: Tensor) -> Tensor:
        """The gradient's sign."""
        return grad.sign()

    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Clamped to x +- eps and to [0, 1]."""
        low, high = (x - self.eps).clamp(0, 1), (x + self.eps).clamp(0, 1)
        return x_adv.clamp(low, high)

    def size(self, delta: Tensor) -> Tensor:
        """The largest change of a pixel."""
        return delta.flatten(1).abs().amax(1)


@dataclass(frozen=True)
class L2(Ball):
    """The change as a vector may have length eps."""

    def start(self, x: Tensor, seed: Stream, index: Tensor, stream: Stream) -> Tensor:
        """A uniform direction at a uniform radius."""
        # reference code: radius eps * U(0, 1), which favours the centre over uniform in volume
        shape = tuple(x.shape[1:])
        away = self.direction(noise.normal(seed, index, stream, shape).to(x))
        apart = noise.derived(stream, RADIUS)
        radius = noise.uniform(seed, index, apart, (1,) * len(shape)).to(x)
        return self.project(x, x + self.eps * radius * away)

    def direction(self, grad: Tensor) -> Tensor:
        """The gradient scaled to length one."""
        return grad / (_length(grad) + 1e-10)

    def project(self, x: Tensor, x_adv: Tensor) -> Tensor:
        """Shortened to length eps, then clamped to [0, 1], which only shortens it further."""
        delta = x_adv - x
        shrink = (self.eps / _length(delta).clamp_min(1e-12)).clamp(max=1)
        return (x + delta * shrink).clamp(0, 1)

    def size(self, delta: Tensor) -> Tensor:
        """The Euclidean length."""
        return _length(delta).flatten()


def _length(delta: Tensor) -> Tensor:
    """Euclidean lengths, shaped to broadcast over images."""
    length: Tensor = delta.flatten(1).norm(dim=1)
    return per_image(length, delta)
