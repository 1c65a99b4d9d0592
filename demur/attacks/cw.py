"""Carlini and Wagner's minimum-distortion attack (2017), for any success criterion.

Adam minimises distance + c * hinge. c grows tenfold until the attack succeeds, then is bisected.
Unlike in the authors' code, each image has its own step count and end, and the tanh range exceeds
[0, 1] by 5%, so that pixels at 0 and 1 have a gradient.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from demur.attacks.attack import AttackBatch, Criterion, FalseRejection, Misclassified
from demur.attacks.attack_model import Model, checked
from demur.attacks.driver import (
    Candidates,
    Found,
    IterativeAttack,
    SearchState,
    SuccessMargins,
    confirmed_outward,
    rounding_margins,
)
from demur.images import per_image
from demur.noise import Stream
from demur.spec.field_types import NonNegative, Positive, PositiveInt

TANH_MARGIN = 0.05  # tanh covers this much more than [0, 1], else pixels at 0 and 1 cannot move
LARGEST_W = math.atanh(1 / (1 + TANH_MARGIN))  # where pixels reach 0 and 1
TAU_SHRINK = 0.9  # of the largest change, after each success (Linf)
C_GROWTH = 10.0  # after each failure
PROGRESS = 0.9999  # a search stops unless a tenth of its steps lowers the loss below this factor
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


class MinimalDistortion(NamedTuple):
    """The result of a minimum-distortion attack."""

    x_adv: Tensor  # shape of x
    broken: Tensor  # whether a success was confirmed in every pass, N, bool
    distance: Tensor  # of x_adv, N; infinite without success


@dataclass
class CWState(SearchState):
    """The state of the searches; `value` is the hinge, `candidate` a closer success."""

    reached: Tensor  # whether x_adv satisfies the criterion, near or far, unverified, N, bool
    grad: Tensor  # of the hinge at x_adv
    w: Tensor  # the image in tanh space
    adam_mean: Tensor
    adam_square: Tensor
    step: Tensor  # in the current search
    total_steps: Tensor  # in all searches
    searches: Tensor  # completed
    rate: Tensor  # learning rate
    c: Tensor
    low: Tensor  # the largest c (or tau for Linf) that failed
    high: Tensor  # the smallest c that succeeded
    tau: Tensor  # changes up to tau are free (Linf)
    succeeded: Tensor  # in the current search, bool
    window_loss: Tensor  # smallest loss since the last progress check
    best_loss: Tensor  # smallest loss up to the last progress check
    closest: Tensor  # closest adversarial example
    distance: Tensor  # of `closest`, infinite without one

    @property
    def best(self) -> tuple[Tensor, Tensor]:
        return self.closest, -self.distance


@dataclass(frozen=True)
class CW(IterativeAttack[CWState]):
    """The closest adversarial example, or the image itself where none is found.

    Args:
        norm: "L2" minimises the squared distance. "Linf" minimises the sum of the changes beyond
            tau and lowers tau after each success. "Linf-adam" minimises the largest change
            directly, as the code of the R-Con paper does; it converges more slowly.
        searches: The number of values of c (or tau) per image.
        steps: The number of gradient queries per search.
        rate: The learning rate of Adam.
        constant: The initial c.
        confidence: The required logit margin.
        criterion: The success criterion.
        abort: Stop a search that makes no progress.
    """

    norm: Literal["L2", "Linf", "Linf-adam"] = "L2"
    searches: PositiveInt = 9
    steps: PositiveInt = 1000
    rate: Positive = 0.005
    constant: Positive = 0.01
    confidence: NonNegative = 0.0
    criterion: Criterion = Misclassified()
    abort: bool = True

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        if isinstance(self.criterion, FalseRejection):  # the prediction has to stay correct
            batch = replace(batch, target=batch.y)
        labels = batch.y, *_target(batch)
        needed, unchanged = rounding_margins(self._hinge, batch.model, batch.x, *labels)
        batch = replace(batch, objective_state=(needed,))
        found = self.best_restart(batch, Found.nothing(batch, unchanged.clone()), 1, stream)
        rows = (found != batch.x).flatten(1).any(1).nonzero()[:, 0]
        if len(rows) == 0:
            return found
        own = batch.select(rows)
        confirmed, _ = confirmed_outward(
            self._hinge, own.model, own.x, found[rows], needed[rows], own.y, *_target(own)
        )
        return found.index_put((rows,), confirmed)

    @property
    def last_step(self) -> int:
        return self.searches * self.steps - 1

    @property
    def _hinge(self) -> SuccessMargins:
        return SuccessMargins(self.criterion, self.confidence)

    def begin(self, batch: AttackBatch) -> tuple[AttackBatch, CWState]:
        return batch, self.step(batch, self._initial_state(batch.x), 0)

    def step(self, batch: AttackBatch, state: CWState, step: int) -> CWState:
        x_adv = to_pixels(state.w)
        inputs = *batch.objective_state, *_target(batch)
        query = batch.model.gradient(self._hinge, x_adv, batch.y, *inputs)
        value = query.value.to(batch.x.dtype)
        reached = (value <= 0) & self.criterion(query.out, batch.y)
        closer = reached & (self._distance(x_adv - batch.x) < state.distance)
        return replace(
            state, x_adv=x_adv, value=value, candidate=closer, reached=reached, grad=query.grad
        )

    def settle(
        self, batch: AttackBatch, state: CWState, verified: Candidates
    ) -> tuple[CWState, Candidates | None]:
        s, ended = self._update_best(state, batch.x, verified.present)
        s = self._start_next_search(s, batch.x, ended)
        s = self._adam_step(s, batch.x, ~ended)
        left = (s.searches < self.searches) & (s.total_steps < self.searches * self.steps)
        return s, Candidates(*s.best, ~left)

    def distances(
        self, model: Model, x: Tensor, y: Tensor, index: Tensor | None = None
    ) -> MinimalDistortion:
        """Return adversarial examples, success and distances (squared for L2)."""
        x_adv = self(model, x, y, index)
        with checked(model, x, y) as (checked_model, images, labels):
            target = (labels,) if isinstance(self.criterion, FalseRejection) else ()
            _, unchanged = rounding_margins(self._hinge, checked_model, images, labels, *target)
            delta = x_adv - images
        # The attack changes an image only where it has confirmed a success.
        success = unchanged | (delta != 0).flatten(1).any(1)
        return MinimalDistortion(x_adv, success, self._distance(delta).where(success, torch.inf))

    def _distance(self, delta: Tensor) -> Tensor:
        """Return the reported distance, N: the squared L2 norm or the Linf norm."""
        flat = delta.flatten(1)
        return flat.square().sum(1) if self.norm == "L2" else flat.abs().amax(1)

    def _penalty_gradient(self, delta: Tensor, tau: Tensor) -> Tensor:
        if self.norm == "L2":
            return 2 * delta
        if self.norm == "Linf":
            return delta.sign() * (delta.abs() > per_image(tau, delta))
        largest = delta.abs() == per_image(self._distance(delta), delta)
        return delta.sign() * largest / per_image(largest.flatten(1).sum(1), delta)

    def _initial_state(self, x: Tensor) -> CWState:
        zero = x.new_zeros(len(x))
        inf, zero_image = torch.full_like(zero, torch.inf), torch.zeros_like(x)
        return CWState(
            x_adv=x, value=zero, candidate=zero.bool(), reached=zero.bool(), grad=zero_image,
            w=to_tanh_space(x), adam_mean=zero_image, adam_square=zero_image, step=zero,
            total_steps=zero, searches=zero, rate=torch.full_like(zero, self.rate),
            c=torch.full_like(zero, self.constant), low=zero, high=inf, tau=torch.ones_like(zero),
            succeeded=zero.bool(), window_loss=inf, best_loss=inf, closest=x, distance=inf,
        )  # fmt: skip

    def _update_best(self, s: CWState, x: Tensor, closer: Tensor) -> tuple[CWState, Tensor]:
        """Return the state with the closest examples updated, and which searches have ended."""
        delta = s.x_adv - x
        distance = self._distance(delta)
        step = s.step + 1
        penalty = distance
        if self.norm == "Linf":
            penalty = (delta.abs() - per_image(s.tau, x)).clamp_min(0).flatten(1).sum(1)
        loss = torch.minimum(s.window_loss, penalty + s.c * s.value)
        check = step % max(1, self.steps // 10) == 0
        stalled = check & (loss > PROGRESS * s.best_loss) if self.abort else torch.zeros_like(check)
        not_closer = s.reached & (distance >= s.distance)
        s = replace(
            s, step=step, total_steps=s.total_steps + 1,
            succeeded=s.succeeded | closer | not_closer,
            closest=s.x_adv.where(per_image(closer, x), s.closest),
            distance=distance.where(closer, s.distance),
            window_loss=torch.full_like(loss, torch.inf).where(check, loss),
            best_loss=torch.minimum(s.best_loss, loss).where(check, s.best_loss),
        )  # fmt: skip
        within = closer & (distance <= s.tau) & (self.norm == "Linf")
        return s, within | stalled | (step == self.steps)

    def _start_next_search(self, s: CWState, x: Tensor, ended: Tensor) -> CWState:
        """Return the state with a new search for the images whose last one has ended."""
        zero, zero_image = torch.zeros_like(s.step), torch.zeros_like(x)
        inf = torch.full_like(zero, torch.inf)
        new = self._lower_tau(s) if self.norm == "Linf" else self._bisect_c(s, x)
        new |= {
            "adam_mean": zero_image, "adam_square": zero_image, "step": zero,
            "succeeded": zero.bool(), "window_loss": inf, "best_loss": inf,
        }  # fmt: skip
        mask = per_image(ended, x)
        return replace(s, **{
            name: value.where(mask if value.ndim > 1 else ended, getattr(s, name))
            for name, value in new.items()
        })  # fmt: skip

    def _bisect_c(self, s: CWState, x: Tensor) -> dict[str, Tensor]:
        """Return the changes for a search from the clean image with the next c."""
        low, high = s.low.where(s.succeeded, s.c), s.c.where(s.succeeded, s.high)
        c = torch.where(high.isinf(), s.c * C_GROWTH, (low + high) / 2)
        searches = s.searches + 1
        return {"w": to_tanh_space(x), "c": c, "low": low, "high": high, "searches": searches}

    def _lower_tau(self, s: CWState) -> dict[str, Tensor]:
        """Return the changes for a search from the closest image with a smaller tau.

        Without success c grows instead.
        """
        within = s.distance <= s.tau
        never = s.distance.isinf()
        low = s.low.where(within | never, s.tau)
        tau = torch.maximum(TAU_SHRINK * s.distance, (low + s.distance) / 2).where(~never, s.tau)
        c = (s.c * C_GROWTH).where(never, s.c)
        rate = s.rate.where(within | never, s.rate / 2)  # smaller steps where tau is bisected
        searches = s.searches + (~within).to(s.searches.dtype)
        return {
            "w": to_tanh_space(s.closest), "c": c, "low": low, "tau": tau, "rate": rate,
            "searches": searches,
        }  # fmt: skip

    def _adam_step(self, s: CWState, x: Tensor, active: Tensor) -> CWState:
        """Return the state after one step of Adam in tanh space for the active images."""
        loss_grad = per_image(s.c, x) * s.grad + self._penalty_gradient(s.x_adv - x, s.tau)
        loss_grad = loss_grad * ((1 + TANH_MARGIN) / 2 * (1 - s.w.tanh().square()))  # d pixel / d w
        mean = torch.lerp(loss_grad, s.adam_mean, BETAS[0])
        square = torch.lerp(loss_grad.square(), s.adam_square, BETAS[1])
        step = per_image(s.step.clamp_min(1), x)
        scale = (square / (1 - BETAS[1] ** step)).sqrt() + ADAM_EPS
        w = s.w - per_image(s.rate, x) * mean / (1 - BETAS[0] ** step) / scale
        mask = per_image(active, x)
        return replace(
            s, w=w.clamp(-LARGEST_W, LARGEST_W).where(mask, s.w),
            adam_mean=mean.where(mask, s.adam_mean),
            adam_square=square.where(mask, s.adam_square),
        )  # fmt: skip


def _target(batch: AttackBatch) -> tuple[Tensor, ...]:
    """Return the class that should be predicted, N, if there is one."""
    return () if batch.target is None else (batch.target,)


def to_tanh_space(x: Tensor) -> Tensor:
    """Return w with `to_pixels(w)` equal to x."""
    return ((2 * x - 1) / (1 + TANH_MARGIN)).atanh()


def to_pixels(w: Tensor) -> Tensor:
    """Return the image of w, clamped to [0, 1] against rounding."""
    return (((1 + TANH_MARGIN) * w.tanh() + 1) / 2).clamp(0, 1)
