"""FAB, the fast adaptive boundary attack (Croce and Hein 2020): a minimum-norm attack.

Unlike the authors' code, it takes any criterion and any margin as objective, and the final search
covers only images close enough to end inside the ball. `confirmed_outward` confirms every success.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from demur import noise, progress
from demur.attacks.attack import AttackBatch, Criterion, Misclassified
from demur.attacks.attack_model import AttackModel, exact_value
from demur.attacks.balls import L1, Ball, in_order
from demur.attacks.driver import (
    Candidates,
    Found,
    IterativeAttack,
    SearchState,
    SuccessMargins,
    confirmed_outward,
    default_interval,
    rounding_margins,
)
from demur.attacks.objectives.classification import (
    Objective,
    ObjectiveState,
    TargetedMargin,
    UntargetedMargin,
)
from demur.images import per_image
from demur.noise import Stream
from demur.spec import later
from demur.spec.field_types import NonNegativeInt, Positive, PositiveInt, UnitInterval

FINAL_SEARCH_STEPS = 3  # towards the clean image, after each restart
FINAL_MARGIN = 0.05  # the final search aims at this fraction of the margin
NEAR = 1.5  # times eps: examples farther away never end inside the ball
SMALLEST_DIVISOR = 1e-12  # divides in place of zero norms, distances and speeds


@dataclass
class FABState(SearchState):
    """The state of a restart; `value` is the margin that the final search uses."""

    crossed: Tensor  # whether x_adv satisfies the criterion, near or far, unverified, N, bool
    closest: Tensor  # closest adversarial example
    distance: Tensor  # of `closest`, N; infinite where there is none

    @property
    def best(self) -> tuple[Tensor, Tensor]:
        return self.closest, -self.distance

    def add(self, x_adv: Tensor, distance: Tensor, success: Tensor) -> "FABState":
        """Return the state with the given examples where they are successful and closer."""
        closer = success & (distance < self.distance)
        return replace(
            self,
            closest=torch.where(per_image(closer, x_adv), x_adv, self.closest),
            distance=torch.where(closer, distance, self.distance),
        )


@dataclass(frozen=True)
class FAB(IterativeAttack[FABState]):
    """Fast adaptive boundary attack; with targets it follows the boundary of the target class.

    Each step linearises the margin of the nearest wrong class and projects onto its zero set. The
    first restart starts at the clean image, as in the authors' code, the others at random.

    Args:
        ball: The norm, and the radius within which a success is returned.
        steps: The number of steps per restart.
        restarts: The number of restarts.
        alpha: The largest weight of the projection of the clean image in a step.
        overshoot: The factor by which a step goes beyond the linearised boundary.
        backward: After a success, the fraction of the perturbation that is kept.
        any_distance: Return the closest success even outside the ball.
        criterion: The success criterion.
        seed: The seed of the random starts.
        objective: A margin that is positive at a success; None uses the logit margins.
    """

    ball: Ball
    steps: PositiveInt = 100
    restarts: PositiveInt = 1
    alpha: UnitInterval = 0.1
    overshoot: Positive = 1.05
    backward: UnitInterval = 0.9
    any_distance: bool = False
    criterion: Criterion = Misclassified()
    seed: NonNegativeInt = 0
    objective: Objective | None = field(default=None, metadata=later(neutral=None))

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        x = batch.x
        _, out = batch.model.value(UntargetedMargin(), x, batch.y)
        success, unchanged = SuccessMargins(self.criterion), self.criterion(out, batch.y)
        if len(done := unchanged.nonzero()[:, 0]):
            unchanged[done] = rounding_margins(success, batch.model, x[done], batch.y[done])[1]
        rows = (~unchanged).nonzero()[:, 0]
        if len(rows) == 0:
            return x.clone()
        batch = self._with_margins(batch.select(rows), out.logits.shape[-1])
        found = Found.nothing(batch)
        for number, every in found.attempts(self.restarts):
            with progress.part(number, self.restarts):
                new = self._restart(batch, found, number, noise.derive_seed(stream, number))
            found.add(every, new)
        limit = torch.finfo(x.dtype).max if self.any_distance else self.ball.eps
        near = (-found.value <= limit).nonzero()[:, 0]
        if len(near) == 0:
            return x.clone()
        inside, (clean, y) = self.ball.contains, (batch.x[near], batch.y[near])
        needed, _ = rounding_margins(success, batch.model, clean, y)
        confirmed, _ = confirmed_outward(
            success, batch.model, clean, found.x_adv[near], needed, y,
            inside=None if self.any_distance else inside,
        )  # fmt: skip
        return x.index_put((rows[near],), confirmed)

    @property
    def maximised(self) -> None:
        return None  # images without success are returned unchanged

    def verification_interval(self, model: AttackModel) -> int:
        return 1 if self.any_distance else default_interval(model)

    def _restart(self, batch: AttackBatch, found: Found, number: int, stream: Stream) -> Found:
        """Run one restart on all images; its values are minus the distances."""
        _, state = self.begin(batch)
        state = replace(state, closest=found.x_adv.clone(), distance=-found.value)
        if number:  # a random point at half of eps, or of the closest distance if that is smaller
            delta = self.ball.scaled_start(batch.x, self.seed, batch.index, stream) - batch.x
            half = (state.distance / max(self.ball.eps, SMALLEST_DIVISOR)).clamp(max=1) / 2
            state = replace(state, x_adv=batch.x + per_image(half, batch.x) * delta)
        return self._final_search(batch, self.iterate(batch, state))

    def _with_margins(self, batch: AttackBatch, classes: int) -> AttackBatch:
        """Return the batch with the objective's state, or with the wrong classes to consider."""
        if self.objective is not None:
            return batch.prepare(self.objective, batch.x)
        if batch.target is not None:
            return replace(batch, objective_state=(batch.target,))
        others = range(1, classes)
        return replace(batch, objective_state=tuple((batch.y + k) % classes for k in others))

    def _overall(self, batch: AttackBatch) -> tuple[Objective, ObjectiveState]:
        """Return one margin for the whole boundary, with its inputs."""
        if self.objective is None:
            return UntargetedMargin(), ()
        return self.objective, self.objective.at_step(batch.objective_state, 0, self.steps)

    def begin(self, batch: AttackBatch) -> tuple[AttackBatch, FABState]:
        none = torch.zeros_like(batch.y, dtype=torch.bool)
        zero = batch.x.new_zeros(len(batch.x))
        return batch, FABState(batch.x, zero, none, none, batch.x, zero + torch.inf)

    def step(self, batch: AttackBatch, state: FABState, step: int) -> FABState:
        shortened = batch.x + self.backward * (state.x_adv - batch.x)
        x_adv = torch.where(per_image(state.crossed, shortened), shortened, state.x_adv)
        x_adv = self._next_iterate(batch, x_adv)
        overall, inputs = self._overall(batch)
        value, out = batch.model.value(overall, x_adv, batch.y, *inputs)
        crossed, distance = self.criterion(out, batch.y), self.ball.norm(x_adv - batch.x)
        # Only examples that may be returned are verified. Those farther away serve as starting
        # points of the final search.
        returnable = (distance <= self.ball.eps) | self.any_distance
        state = state.add(x_adv, distance, crossed & ~returnable)
        candidate = crossed & returnable & (distance < state.distance)
        return replace(
            state, x_adv=x_adv, value=value.to(x_adv), candidate=candidate, crossed=crossed
        )

    def settle(
        self, batch: AttackBatch, state: FABState, verified: Candidates
    ) -> tuple[FABState, Candidates | None]:
        distance = self.ball.norm(verified.x_adv - batch.x)
        return state.add(verified.x_adv, distance, verified.present), None

    def _next_iterate(self, batch: AttackBatch, x_adv: Tensor) -> Tensor:
        """Return the next iterate: a mix of the projections of the iterate and the clean image."""
        x, (grad, margin) = batch.x, self._nearest_margin(batch, x_adv)
        rise_from_clean = (grad * (x_adv - x)).flatten(1).sum(1) - margin  # the same hyperplane
        points, rises = torch.cat((x_adv, x)), torch.cat((-margin, rise_from_clean))
        both = project_to_hyperplane(self.ball, points, torch.cat((grad, grad)), rises)
        from_iterate, from_clean = both.chunk(2)
        near, far = self.ball.norm(from_iterate), self.ball.norm(from_clean)
        weight = (near / (near + far).clamp_min(SMALLEST_DIVISOR)).clamp(max=self.alpha)
        weight = per_image(weight, x_adv)
        projected_iterate = x_adv + self.overshoot * from_iterate
        projected_clean = x + self.overshoot * from_clean
        return ((1 - weight) * projected_iterate + weight * projected_clean).clamp(0, 1)

    def _nearest_margin(self, batch: AttackBatch, x_adv: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient and value of the margin whose linearised zero set is nearest."""
        objective, inputs = self._overall(batch)
        all_inputs = [inputs]
        if self.objective is None:
            objective, all_inputs = TargetedMargin(), [(t,) for t in batch.objective_state]
        nearest_grad, margin = torch.zeros_like(x_adv), x_adv.new_zeros(len(x_adv))
        shortest = torch.full_like(margin, torch.inf)
        for inputs in all_inputs:
            grad, value, _ = batch.model.gradient(objective, x_adv, batch.y, *inputs)
            grad, value = grad.to(x_adv), value.to(x_adv)
            dual_norm = (grad * self.ball.direction(grad)).flatten(1).sum(1)
            distance = value.abs() / dual_norm.clamp_min(SMALLEST_DIVISOR)
            nearer = distance < shortest
            nearest_grad = torch.where(per_image(nearer, grad), grad, nearest_grad)
            margin = torch.where(nearer, value, margin)
            shortest = torch.where(nearer, distance, shortest)
        return nearest_grad, margin

    def _final_search(self, batch: AttackBatch, found: Found) -> Found:
        """Search on the segment to the clean image (regula falsi, else bisection), in fp32."""
        reach = torch.finfo(batch.x.dtype).max if self.any_distance else NEAR * self.ball.eps
        rows = (-found.value <= reach).nonzero()[:, 0]
        if len(rows) == 0:
            return found
        batch = batch.select(rows)
        objective, inputs = self._overall(batch)
        low, high = batch.x, found.x_adv[rows]
        low_value = exact_value(batch.model, objective, low, batch.y, *inputs)[0].to(batch.x)
        high_value = exact_value(batch.model, objective, high, batch.y, *inputs)[0].to(batch.x)
        for _ in range(FINAL_SEARCH_STEPS):
            fraction = (FINAL_MARGIN * high_value - low_value) / (high_value - low_value)
            # The objective of another criterion may not change its sign on the segment.
            crosses = (low_value <= 0) & (high_value > 0)
            fraction = torch.where(crosses, fraction, torch.full_like(fraction, 0.5))
            middle = low + per_image(fraction, low) * (high - low)
            value, out = exact_value(batch.model, objective, middle, batch.y, *inputs)
            value, success = value.to(batch.x), self.criterion(out, batch.y)
            nearness = -self.ball.norm(middle - batch.x)
            closer = (success & (nearness > found.value[rows])).nonzero()[:, 0]
            found.set(rows[closer], middle[closer], nearness[closer])
            mask = per_image(success, low)
            low, high = torch.where(mask, low, middle), torch.where(mask, middle, high)
            low_value = torch.where(success, low_value, value)
            high_value = torch.where(success, value, high_value)
        return found


def project_to_hyperplane(ball: Ball, x: Tensor, grad: Tensor, rise: Tensor) -> Tensor:
    """Return the smallest perturbation within [0, 1] that raises a linear function by `rise` (N).

    Where that is impossible, return the perturbation with the largest rise. Pixels move at the
    speed of the ball's steepest ascent until they reach 0 or 1; the stopping time is exact. In L1
    they move one after the other, that of the largest gradient first.
    """
    toward = (grad * per_image(rise.sign(), x)).flatten(1)
    slack = torch.where(toward > 0, 1 - x.flatten(1), x.flatten(1))  # up to the pixel range
    if isinstance(ball, L1):
        size = toward.abs()
        return (toward.sign() * in_order(size, slack, size, rise.abs()[:, None])).view_as(x)
    speed = ball.direction(grad).abs().flatten(1)
    gain = toward.abs() * speed  # of the function per unit of time
    stop_time = torch.where(gain > 0, slack / speed.clamp_min(SMALLEST_DIVISOR), 0)
    find_time = sorted_time if x.is_cuda else newton_time
    time = find_time(gain, stop_time, rise.abs()[:, None])
    return (toward.sign() * slack.minimum(time * speed)).view_as(x)


def sorted_time(gain: Tensor, stop_time: Tensor, rise: Tensor) -> Tensor:
    """Return when pixels that gain until they stop have gained `rise` in sum, N, 1, by sorting.

    Where they never do, return the time when the last pixel stops. The host does not wait. `gain`
    is that of each pixel per unit of time, and `stop_time` is when it stops, N, D each.
    """
    stop_time, order = stop_time.sort(1)
    gain = gain.gather(1, order)
    stopped_gain = (gain * stop_time).cumsum(1) - gain * stop_time  # of pixels stopped earlier
    moving_gain = gain.flip(1).cumsum(1).flip(1)  # of this pixel and those after it
    passed = (stopped_gain + moving_gain * stop_time < rise).sum(1, keepdim=True)
    last = passed.clamp(max=stop_time.shape[1] - 1)
    missing = rise - stopped_gain.gather(1, last)
    time = missing / moving_gain.gather(1, last).clamp_min(torch.finfo(gain.dtype).tiny)
    return time.clamp(min=0).minimum(stop_time[:, -1:])


def newton_time(gain: Tensor, stop_time: Tensor, rise: Tensor) -> Tensor:
    """Return what `sorted_time` returns by Newton's method, of which a CPU needs less time.

    The gain is concave and piecewise linear in time, so the steps never pass the solution and end
    on its piece. Nearly all images need fewer than six.
    """
    gain_at_stop, last = gain * stop_time, stop_time.amax(1, keepdim=True)
    time, before = torch.zeros_like(rise), None
    while True:
        moving = stop_time > time
        count = moving.sum(1)
        if before is not None and torch.equal(count, before):
            return time
        stopped_gain = gain_at_stop.masked_fill(moving, 0).sum(1, keepdim=True)
        moving_gain = (gain * moving).sum(1, keepdim=True)
        reached = (rise - stopped_gain) / moving_gain.clamp_min(torch.finfo(gain.dtype).tiny)
        time, before = torch.maximum(time, reached.minimum(last)), count
