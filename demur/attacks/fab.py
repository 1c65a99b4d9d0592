"""FAB: the closest image that is broken, by walking along the boundary (Croce and Hein 2020).

    FAB(Linf(8/255))                         # broken where an image within 8/255 was found
    FAB(L2(0.5), any_distance=True)          # the closest found, to report distances
    FAB(Linf(8/255), goal=Least(rule), criterion=rule)     # into what is wrong and accepted

Each step takes the margin of the nearest wrong class as linear and goes just beyond its zero. A
`goal` is such a margin itself: positive where an image is broken.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.criteria import Criterion, Wrong
from demur.attacks.goals import Goal, Kept, Margin, Moment, Toward
from demur.attacks.victims import Claims, Victims, block_for, confirmed
from demur.balls import Ball
from demur.batch import per_image
from demur.declared import Count, Natural, Positive, Share
from demur.gradient import glance, gradient, value_at
from demur.noise import Stream
from demur.spec import later

SEARCHES, BEYOND = 3, 0.05  # the last search, and the share of the margin it leaves
NEAR = 1.5  # times the radius: what was found farther away no search brings within it
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
class Border:
    """Margins that are zero where images begin to be broken, and one margin of all of them."""

    part: Goal
    each: list[Kept]  # what `part` is given for each of the margins
    whole: Goal
    given: Kept


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
    goal: Goal | None = field(default=None, metadata=later(neutral=None))

    def against(self, on: Victims, stream: Stream) -> Tensor:
        """The closest broken images within reach, and the others as they are."""
        x = on.x
        _, out = glance(on.model, Margin(), x, on.y)
        broken = confirmed(self.criterion, on.model, x, on.y, self.criterion(out, on.y))
        whole = (~broken).nonzero()[:, 0]
        if len(whole) == 0:
            return x.clone()
        on = on.at(whole)
        border, best = self._border(on, out.logits.shape[-1]), Closest.none(on.x)
        for restart in range(self.restarts):
            begin = self._begun(on, best, noise.derived(stream, restart)) if restart else on.x
            best = self._searched(on, border, self._walked(on, border, begin, best))
        within = best.far.isfinite() if self.any_distance else best.far <= self.ball.eps
        return x.index_put((whole[within],), best.x_adv[within])

    def _begun(self, on: Victims, best: Closest, stream: Stream) -> Tensor:
        """A random place half as far as the ball reaches, or as the closest found if nearer."""
        away = self.ball.scaled_start(on.x, self.seed, on.index, stream) - on.x
        share = (best.far / max(self.ball.eps, TINY)).clamp(max=1) / 2
        return on.x + per_image(share, on.x) * away

    def _border(self, on: Victims, classes: int) -> Border:
        """What separates the images from those that are broken."""
        if self.goal is None:
            return Border(Toward(), [(aim,) for aim in _aims(on, classes)], Margin(), ())
        kept = self.goal.begin(Moment(on.model, on.x, on.x, on.y, on.target))
        given = self.goal.given(kept, 0, self.steps)
        return Border(self.goal, [given], self.goal, given)

    def _walked(self, on: Victims, border: Border, x_adv: Tensor, best: Closest) -> Closest:
        """The closest broken images after one restart."""
        claims, block = Claims.none(on.x), 1 if self.any_distance else block_for(on.model)
        for step in range(1, self.steps + 1):
            slope, margin = self._nearest(on, border, x_adv)
            ahead, over = self._to_border(on.x, x_adv, slope, margin)
            near, far = self.ball.size(ahead), self.ball.size(over)
            share = per_image((near / (near + far).clamp_min(TINY)).clamp(max=self.alpha), x_adv)
            moved, anew = x_adv + self.overshoot * ahead, on.x + self.overshoot * over
            x_adv = ((1 - share) * moved + share * anew).clamp(0, 1)
            value, out = glance(on.model, border.whole, x_adv, on.y, *border.given)
            broken, far = self.criterion(out, on.y), self.ball.size(x_adv - on.x)
            matters = self._might_be_returned(far)
            best = best.or_closer(x_adv, far, broken & ~matters)
            new = broken & matters & (far < best.far)
            claims = claims.or_surer(x_adv, value.to(x_adv), new)
            if step % block == 0 or step == self.steps:
                best, claims = self._settled(on, best, claims), Claims.none(on.x)
            back = on.x + self.backward * (x_adv - on.x)
            x_adv = torch.where(per_image(broken, x_adv), back, x_adv)
        return best

    def _to_border(
        self, x: Tensor, x_adv: Tensor, slope: Tensor, margin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The changes that lead to the border, from where images are and from the clean ones."""
        missing = (slope * (x_adv - x)).flatten(1).sum(1) - margin  # the same plane, seen from x
        both = torch.cat((x_adv, x)), torch.cat((slope, slope)), torch.cat((-margin, missing))
        ahead, over = to_plane(self.ball, *both).chunk(2)  # one sort for both
        return ahead, over

    def _might_be_returned(self, far: Tensor) -> Tensor:
        """Who is close enough; what lies farther away is only where a search begins."""
        return torch.ones_like(far, dtype=torch.bool) if self.any_distance else far <= self.ball.eps

    def _settled(self, on: Victims, best: Closest, claims: Claims) -> Closest:
        """The closest, with those of the claims that are confirmed."""
        true = claims.true(self.criterion, on)
        return best.or_closer(claims.x_adv, self.ball.size(claims.x_adv - on.x), true)

    def _nearest(self, on: Victims, border: Border, x_adv: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and value of the margin whose zero is the nearest, taking each as linear."""
        slope, margin = torch.zeros_like(x_adv), x_adv.new_zeros(len(x_adv))
        least = torch.full_like(margin, torch.inf)
        for given in border.each:
            grad, value, _ = gradient(on.model, border.part, x_adv, on.y, *given)
            grad, value = grad.to(x_adv), value.to(x_adv)
            steepest = (grad * self.ball.direction(grad)).flatten(1).sum(1)  # the dual norm
            far = value.abs() / steepest.clamp_min(TINY)
            nearer = far < least
            slope = torch.where(per_image(nearer, grad), grad, slope)
            margin, least = torch.where(nearer, value, margin), torch.where(nearer, far, least)
        return slope, margin

    def _searched(self, on: Victims, border: Border, best: Closest) -> Closest:
        """The closest broken images after a search on the line to the clean image."""
        reach = torch.inf if self.any_distance else NEAR * self.ball.eps
        found = (best.far.isfinite() & (best.far <= reach)).nonzero()[:, 0]
        if len(found) == 0:
            return best
        on, goal, given = on.at(found), border.whole, [part[found] for part in border.given]
        closest = Closest(best.x_adv[found], best.far[found])
        low, high = on.x, closest.x_adv
        low_value = value_at(on.model, goal, low, on.y, *given)[0].to(on.x)
        high_value = value_at(on.model, goal, high, on.y, *given)[0].to(on.x)
        for _ in range(SEARCHES):
            share = (BEYOND * high_value - low_value) / (high_value - low_value)
            crosses = (low_value <= 0) & (high_value > 0)  # other criteria may break elsewhere
            share = torch.where(crosses, share, torch.full_like(share, 0.5))
            between = low + per_image(share, low) * (high - low)
            value, out = value_at(on.model, goal, between, on.y, *given)
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
