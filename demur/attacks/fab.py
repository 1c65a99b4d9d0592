"""FAB: the closest image that is broken, by walking along the boundary (Croce and Hein 2020).

    FAB(Linf(8/255))                         # broken where an image within 8/255 was found
    FAB(L2(0.5), any_distance=True)          # the closest found, to report distances
    FAB(Linf(8/255), objective=MinMargin(rule), criterion=rule)     # into what is wrong and accepted

Each step takes the margin of the nearest wrong class as linear and goes just beyond its zero. A
`goal` is such a margin itself: positive where an image is broken.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from demur import noise
from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch, Candidates, verification_interval, verify_success
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.objectives import (
    AttackStart,
    LogitMargin,
    Objective,
    ObjectiveState,
    TargetedMargin,
)
from demur.balls import Ball
from demur.field_types import NonNegativeInt, Positive, PositiveInt, UnitInterval
from demur.gradient import approximate_value, exact_value, gradient
from demur.images import per_image
from demur.noise import Stream
from demur.spec import later

SEARCHES, BEYOND = 3, 0.05  # the last search, and the share of the margin it leaves
NEAR = 1.5  # times the radius: what was found farther away no search brings within it
TINY = 1e-12


@dataclass(frozen=True)
class ClosestAdversarial:
    """The closest broken image found so far, one row per image."""

    x_adv: Tensor
    far: Tensor  # N, infinite where none was found

    @classmethod
    def none(cls, x: Tensor) -> "ClosestAdversarial":
        """Nothing found yet."""
        return cls(x, x.new_full((len(x),), torch.inf))

    def or_closer(self, x_adv: Tensor, far: Tensor, broken: Tensor) -> "ClosestAdversarial":
        """These, or the given ones where they are broken and closer."""
        closer = broken & (far < self.far)
        wide = per_image(closer, x_adv)
        return ClosestAdversarial(
            torch.where(wide, x_adv, self.x_adv), torch.where(closer, far, self.far)
        )


@dataclass(frozen=True)
class Boundary:
    """Margins that are zero where images begin to be broken, and one margin of all of them."""

    part: Objective
    each: list[ObjectiveState]  # what `part` is given for each of the margins
    whole: Objective
    inputs: ObjectiveState


@dataclass(frozen=True)
class FAB(Attack):
    """Fast adaptive boundary; a target makes it walk along the boundary of that class alone.

    The first restart begins at the image itself, as in the reference code, the others at random.
    """

    ball: Ball
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    alpha: UnitInterval = 0.1  # at most this much of each step is taken from the clean image
    overshoot: Positive = 1.05
    backward: UnitInterval = 0.9  # of the change is kept once an image is broken
    any_distance: bool = False  # return what is broken even outside the ball
    criterion: Criterion = Misclassified()
    seed: NonNegativeInt = 0
    objective: Objective | None = field(default=None, metadata=later(neutral=None))

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """The closest broken images within reach, and the others as they are."""
        x = batch.x
        _, out = approximate_value(batch.model, LogitMargin(), x, batch.y)
        broken = verify_success(
            self.criterion, batch.model, x, batch.y, self.criterion(out, batch.y)
        )
        whole = (~broken).nonzero()[:, 0]
        if len(whole) == 0:
            return x.clone()
        batch = batch.select(whole)
        boundary, best = self._border(batch, out.logits.shape[-1]), ClosestAdversarial.none(batch.x)
        for restart in range(self.restarts):
            prepare = (
                self._begun(batch, best, noise.derived(stream, restart)) if restart else batch.x
            )
            best = self._searched(batch, boundary, self._walked(batch, boundary, prepare, best))
        within = best.far.isfinite() if self.any_distance else best.far <= self.ball.eps
        return x.index_put((whole[within],), best.x_adv[within])

    def _begun(self, batch: AttackBatch, best: ClosestAdversarial, stream: Stream) -> Tensor:
        """A random place half as far as the ball reaches, or as the closest found if nearer."""
        away = self.ball.scaled_start(batch.x, self.seed, batch.index, stream) - batch.x
        share = (best.far / max(self.ball.eps, TINY)).clamp(max=1) / 2
        return batch.x + per_image(share, batch.x) * away

    def _border(self, batch: AttackBatch, classes: int) -> Boundary:
        """What separates the images from those that are broken."""
        if self.objective is None:
            return Boundary(
                TargetedMargin(), [(aim,) for aim in _aims(batch, classes)], LogitMargin(), ()
            )
        objective_state = self.objective.prepare(
            AttackStart(batch.model, batch.x, batch.x, batch.y, batch.target)
        )
        inputs = self.objective.at_step(objective_state, 0, self.steps)
        return Boundary(self.objective, [inputs], self.objective, inputs)

    def _walked(
        self, batch: AttackBatch, boundary: Boundary, x_adv: Tensor, best: ClosestAdversarial
    ) -> ClosestAdversarial:
        """The closest broken images after one restart."""
        claims, block = (
            Candidates.none(batch.x),
            1 if self.any_distance else verification_interval(batch.model),
        )
        for step in range(1, self.steps + 1):
            gradient_only, margin = self._nearest(batch, boundary, x_adv)
            ahead, over = self._to_border(batch.x, x_adv, gradient_only, margin)
            near, far = self.ball.size(ahead), self.ball.size(over)
            share = per_image((near / (near + far).clamp_min(TINY)).clamp(max=self.alpha), x_adv)
            moved, anew = x_adv + self.overshoot * ahead, batch.x + self.overshoot * over
            x_adv = ((1 - share) * moved + share * anew).clamp(0, 1)
            value, out = approximate_value(
                batch.model, boundary.whole, x_adv, batch.y, *boundary.inputs
            )
            broken, far = self.criterion(out, batch.y), self.ball.size(x_adv - batch.x)
            matters = self._might_be_returned(far)
            best = best.or_closer(x_adv, far, broken & ~matters)
            new = broken & matters & (far < best.far)
            claims = claims.update(x_adv, value.to(x_adv), new)
            if step % block == 0 or step == self.steps:
                best, claims = self._settled(batch, best, claims), Candidates.none(batch.x)
            back = batch.x + self.backward * (x_adv - batch.x)
            x_adv = torch.where(per_image(broken, x_adv), back, x_adv)
        return best

    def _to_border(
        self, x: Tensor, x_adv: Tensor, gradient_only: Tensor, margin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The changes that lead to the border, from where images are and from the clean ones."""
        missing = (gradient_only * (x_adv - x)).flatten(1).sum(
            1
        ) - margin  # the same plane, seen from x
        both = (
            torch.cat((x_adv, x)),
            torch.cat((gradient_only, gradient_only)),
            torch.cat((-margin, missing)),
        )
        ahead, over = to_plane(self.ball, *both).chunk(2)  # one sort for both
        return ahead, over

    def _might_be_returned(self, far: Tensor) -> Tensor:
        """Who is close enough; what lies farther away is only where a search begins."""
        return torch.ones_like(far, dtype=torch.bool) if self.any_distance else far <= self.ball.eps

    def _settled(
        self, batch: AttackBatch, best: ClosestAdversarial, claims: Candidates
    ) -> ClosestAdversarial:
        """The closest, with those of the claims that are confirmed."""
        true = claims.true(self.criterion, batch)
        return best.or_closer(claims.x_adv, self.ball.size(claims.x_adv - batch.x), true)

    def _nearest(
        self, batch: AttackBatch, boundary: Boundary, x_adv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Slope and value of the margin whose zero is the nearest, taking each as linear."""
        gradient_only, margin = torch.zeros_like(x_adv), x_adv.new_zeros(len(x_adv))
        least = torch.full_like(margin, torch.inf)
        for inputs in boundary.each:
            grad, value, _ = gradient(batch.model, boundary.part, x_adv, batch.y, *inputs)
            grad, value = grad.to(x_adv), value.to(x_adv)
            steepest = (grad * self.ball.direction(grad)).flatten(1).sum(1)  # the dual norm
            far = value.abs() / steepest.clamp_min(TINY)
            nearer = far < least
            gradient_only = torch.where(per_image(nearer, grad), grad, gradient_only)
            margin, least = torch.where(nearer, value, margin), torch.where(nearer, far, least)
        return gradient_only, margin

    def _searched(
        self, batch: AttackBatch, boundary: Boundary, best: ClosestAdversarial
    ) -> ClosestAdversarial:
        """The closest broken images after a search on the line to the clean image."""
        reach = torch.inf if self.any_distance else NEAR * self.ball.eps
        found = (best.far.isfinite() & (best.far <= reach)).nonzero()[:, 0]
        if len(found) == 0:
            return best
        batch, objective, inputs = (
            batch.select(found),
            boundary.whole,
            [part[found] for part in boundary.inputs],
        )
        closest = ClosestAdversarial(best.x_adv[found], best.far[found])
        low, high = batch.x, closest.x_adv
        low_value = exact_value(batch.model, objective, low, batch.y, *inputs)[0].to(batch.x)
        high_value = exact_value(batch.model, objective, high, batch.y, *inputs)[0].to(batch.x)
        for _ in range(SEARCHES):
            share = (BEYOND * high_value - low_value) / (high_value - low_value)
            crosses = (low_value <= 0) & (high_value > 0)  # other criteria may break elsewhere
            share = torch.where(crosses, share, torch.full_like(share, 0.5))
            between = low + per_image(share, low) * (high - low)
            value, out = exact_value(batch.model, objective, between, batch.y, *inputs)
            value, broken = value.to(batch.x), self.criterion(out, batch.y)
            closest = closest.or_closer(between, self.ball.size(between - batch.x), broken)
            wide = per_image(broken, low)
            low, high = torch.where(wide, low, between), torch.where(wide, between, high)
            low_value = torch.where(broken, low_value, value)
            high_value = torch.where(broken, value, high_value)
        return ClosestAdversarial(
            best.x_adv.index_put((found,), closest.x_adv), best.far.index_put((found,), closest.far)
        )


def to_plane(ball: Ball, x: Tensor, gradient_only: Tensor, rise: Tensor) -> Tensor:
    """The smallest change within [0, 1] that makes a linear function rise so much, or the most.

    Pixels move at their speed in the ball's norm until they meet the box; when to stop is exact.
    """
    toward = (gradient_only * per_image(rise.sign(), x)).flatten(1)
    room = torch.where(toward > 0, 1 - x.flatten(1), x.flatten(1))
    speed = ball.direction(gradient_only).abs().flatten(1)
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


def _aims(batch: AttackBatch, classes: int) -> Tensor:
    """The wrong classes whose margins count: the target alone, or all of them."""
    if batch.target is not None:
        return batch.target[None]
    apart = torch.arange(1, classes, device=batch.y.device)
    return (batch.y + apart[:, None]) % classes  # C - 1, N
