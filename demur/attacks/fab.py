"""FAB: the closest image that is broken, by walking along the boundary (Croce and Hein 2020).

    FAB(Linf(8/255))                         # broken where an image within 8/255 was found
    FAB(L2(0.5), any_distance=True)          # the closest found, to report distances
    EachTarget(FAB(Linf(8/255)), targets=9, keep="criterion")

Each step takes the margin of the nearest wrong class as linear and goes just beyond its zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.criteria import Criterion, Wrong
from demur.attacks.goals import Margin, Toward
from demur.attacks.victims import Victims, per_image
from demur.balls import Ball
from demur.declared import Count, Natural, Positive, Share
from demur.gradient import gradient, value_at
from demur.noise import Stream

SEARCHES, BEYOND = 3, 0.05  # the last search, and the share of the margin it leaves
TINY = 1e-12


@dataclass(frozen=True)
class Closest:
    """The closest broken image found so far, one row per image."""

    x_adv: Tensor
    far: Tensor  # N, infinite where none was found

    @classmethod
    def none(cls, x: Tensor) -> "Closest":
        """Nothing found yet."""
        return cls(x, x.new_full((len(x),), torch.inf))

    def or_closer(self, x_adv: Tensor, far: Tensor, broken: Tensor) -> "Closest":
        """These, or the given ones where they are broken and closer."""
        closer = broken & (far < self.far)
        wide = per_image(closer, x_adv)
        return Closest(torch.where(wide, x_adv, self.x_adv), torch.where(closer, far, self.far))


@dataclass(frozen=True)
class FAB(Attack):
    """Fast adaptive boundary; a target makes it walk along the boundary of that class alone.

    The first restart begins at the image itself, as in the reference code, the others at random.
    """

    ball: Ball
    steps: Count = 100
    restarts: Count = 1
    alpha: Share = 0.1  # at most this much of each step is taken from the clean image
    overshoot: Positive = 1.05
    backward: Share = 0.9  # of the change is kept once an image is broken
    any_distance: bool = False  # return what is broken even outside the ball
    criterion: Criterion = Wrong()
    seed: Natural = 0

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """The closest broken images within reach, and the others as they are."""
        x = on.x
        margin, out = value_at(on.model, Margin(), x, on.y)
        whole = (~self.criterion(out, on.y)).nonzero()[:, 0]
        if len(whole) == 0:
            return x.clone()
        on = on.at(whole)
        aims, best = _aims(on, out.logits.shape[-1]), Closest.none(on.x)
        for restart in range(self.restarts):
            begin = self._begun(on, best, noise.derived(stream, restart)) if restart else on.x
            best = self._searched(on, self._walked(on, begin, aims, best), margin[whole])
        within = best.far.isfinite() if self.any_distance else best.far <= self.ball.eps
        return x.index_put((whole[within],), best.x_adv[within])

    def _begun(self, on: Victims, best: Closest, stream: Stream) -> Tensor:
        """A random place half as far as the ball reaches, or as the closest found if nearer."""
        away = self.ball.scaled_start(on.x, self.seed, on.index, stream) - on.x
        share = (best.far / max(self.ball.eps, TINY)).clamp(max=1) / 2
        return on.x + per_image(share, on.x) * away

    def _walked(self, on: Victims, x_adv: Tensor, aims: Tensor, best: Closest) -> Closest:
        """The closest broken images after one restart."""
        for _ in range(self.steps):
            slope, margin = self._nearest(on, x_adv, aims)
            ahead = to_plane(self.ball, x_adv, slope, -margin)
            # the same plane, seen from the clean image
            missing = (slope * (x_adv - on.x)).flatten(1).sum(1) - margin
            over = to_plane(self.ball, on.x, slope, missing)
            near, far = self.ball.size(ahead), self.ball.size(over)
            share = per_image((near / (near + far).clamp_min(TINY)).clamp(max=self.alpha), x_adv)
            moved, anew = x_adv + self.overshoot * ahead, on.x + self.overshoot * over
            x_adv = ((1 - share) * moved + share * anew).clamp(0, 1)
            _, out = value_at(on.model, Margin(), x_adv, on.y)
            broken = self.criterion(out, on.y)
            best = best.or_closer(x_adv, self.ball.size(x_adv - on.x), broken)
            back = on.x + self.backward * (x_adv - on.x)
            x_adv = torch.where(per_image(broken, x_adv), back, x_adv)
        return best

    def _nearest(self, on: Victims, x_adv: Tensor, aims: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and value of the margin whose zero is the nearest, taking each as linear."""
        slope, margin = torch.zeros_like(x_adv), x_adv.new_zeros(len(x_adv))
        least = torch.full_like(margin, torch.inf)
        for aim in aims:
            grad, value, _ = gradient(on.model, Toward(), x_adv, on.y, aim)
            grad, value = grad.to(x_adv), value.to(x_adv)
            steepest = (grad * self.ball.direction(grad)).flatten(1).sum(1)  # the dual norm
            far = value.abs() / steepest.clamp_min(TINY)
            nearer = far < least
            slope = torch.where(per_image(nearer, grad), grad, slope)
            margin, least = torch.where(nearer, value, margin), torch.where(nearer, far, least)
        return slope, margin

    def _searched(self, on: Victims, best: Closest, margin: Tensor) -> Closest:
        """The closest broken images after a search on the line to the clean image."""
        found = best.far.isfinite().nonzero()[:, 0]
        if len(found) == 0:
            return best
        on, low, low_value = on.at(found), on.x[found], margin[found].to(on.x)
        closest = Closest(best.x_adv[found], best.far[found])
        high = closest.x_adv
        high_value = value_at(on.model, Margin(), high, on.y)[0].to(on.x)
        for _ in range(SEARCHES):
            share = (BEYOND * high_value - low_value) / (high_value - low_value)
            crosses = (low_value <= 0) & (high_value > 0)  # other criteria may break elsewhere
            share = torch.where(crosses, share, torch.full_like(share, 0.5))
            between = low + per_image(share, low) * (high - low)
            value, out = value_at(on.model, Margin(), between, on.y)
            value, broken = value.to(on.x), self.criterion(out, on.y)
            closest = closest.or_closer(between, self.ball.size(between - on.x), broken)
            wide = per_image(broken, low)
            low, high = torch.where(wide, low, between), torch.where(wide, between, high)
            low_value = torch.where(broken, low_value, value)
            high_value = torch.where(broken, value, high_value)
        return Closest(
            best.x_adv.index_put((found,), closest.x_adv), best.far.index_put((found,), closest.far)
        )


def to_plane(ball: Ball, x: Tensor, slope: Tensor, rise: Tensor) -> Tensor:
    """The smallest change within [0, 1] that makes a linear function rise so much, or the most.

    Pixels move at their speed in the ball's norm until they meet the box; when to stop is exact.
    """
    toward = (slope * per_image(rise.sign(), x)).flatten(1)
    room = torch.where(toward > 0, 1 - x.flatten(1), x.flatten(1))
    speed = ball.direction(slope).abs().flatten(1)
    gain = toward.abs() * speed  # of the function per unit of time
    until = torch.where(gain > 0, room / speed.clamp_min(TINY), 0)
    until, order = until.sort(1)
    gain = gain.gather(1, order)
    spent = (gain * until).cumsum(1) - gain * until  # by the pixels that stopped before
    going = gain.flip(1).cumsum(1).flip(1)  # this pixel and those after it
    passed = (spent + going * until < rise.abs()[:, None]).sum(1, keepdim=True)
    stop = passed.clamp(max=until.shape[1] - 1)
    left = rise.abs()[:, None] - spent.gather(1, stop)
    time = left / going.gather(1, stop).clamp_min(torch.finfo(x.dtype).tiny)
    time = time.clamp(min=0).minimum(until[:, -1:])  # out of reach: as far as there is room
    return (toward.sign() * room.minimum(time * speed)).view_as(x)


def _aims(on: Victims, classes: int) -> Tensor:
    """The wrong classes whose margins count: the target alone, or all of them."""
    if on.target is not None:
        return on.target[None]
    apart = torch.arange(1, classes, device=on.y.device)
    return (on.y + apart[:, None]) % classes  # C - 1, N
