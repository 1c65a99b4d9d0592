"""Carlini and Wagner's minimum-distortion attack (2017), for any success criterion.

    CW("L2").distances(model, x, y)                     # examples, success and distance per image
    CW("Linf", criterion=AcceptedError(RCon(), 0.5))    # the closest accepted error

Adam minimises distance + c * hinge. c grows tenfold until the attack succeeds, then is bisected.
Unlike in the authors' code, each image has its own step count and end, and the tanh range exceeds
[0, 1] by 5%, so that pixels at 0 and 1 have a gradient.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch, PerImageState, verify_success
from demur.attacks.checked_model import checked
from demur.attacks.criteria import (
    AcceptedError,
    Criterion,
    FalseRejection,
    Misclassified,
    Rejected,
    RuleCriterion,
)
from demur.attacks.objectives.accepted_error import best_wrong_class
from demur.attacks.objectives.untargeted import best_wrong
from demur.field_types import NonNegative, Positive, PositiveInt
from demur.gradient import Gradient, Model, exact_value, gradient
from demur.images import per_image
from demur.noise import Stream
from demur.output import Output, label_entry, prediction

TANH_MARGIN = 0.05  # tanh covers this much more than [0, 1], else pixels at 0 and 1 cannot move
SLACK = 1e-5  # relative, on logits and thresholds: another batch size rounds differently
TAU_SHRINK = 0.9  # of the largest change, after each success (Linf)
C_GROWTH = 10.0  # after each failure
PROGRESS = 0.9999  # a search stops unless a tenth of its steps lowers the loss below this factor
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


class MinimalDistortion(NamedTuple):
    """The result of a minimum-distortion attack."""

    x_adv: Tensor  # shape of x
    broken: Tensor  # whether the attack succeeded, N, bool
    distance: Tensor  # N, infinite without success


@dataclass(frozen=True)
class CWHinge:
    """The hinge loss of the attack: what is missing for success, 0 at a success, N.

    It is the missing logit margin plus the missing accept margin of each score of the criterion.
    """

    criterion: Criterion
    confidence: float

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        slack = SLACK * out.logits.detach().abs().nan_to_num(posinf=0).amax(-1)  # -inf: masked
        missing = (self.confidence + slack - logit_margin(out, y, *inputs)).clamp_min(0)
        if not isinstance(self.criterion, RuleCriterion):
            return missing
        if isinstance(self.criterion, Rejected):  # for any prediction
            return self._missing_decision(out, self.criterion, prediction(out))
        label = inputs[0] if inputs else best_wrong_class(out.logits, y)
        return missing + self._missing_decision(out, self.criterion, label)

    def _missing_decision(self, out: Output, criterion: RuleCriterion, label: Tensor) -> Tensor:
        """Return what the scores lack for the decision, N; one low score is enough to reject."""
        pairs = criterion.accept_rule.pairs
        if isinstance(criterion, AcceptedError):
            below = [
                SLACK * max(1, abs(t)) - score.accept_margin(out, t, label) for score, t in pairs
            ]
            return torch.stack(below).clamp_min(0).sum(0)
        above = [SLACK * max(1, abs(t)) + score.accept_margin(out, t, label) for score, t in pairs]
        return torch.stack(above).amin(0).clamp_min(0)


@dataclass
class CWState(PerImageState):
    """The state of the searches; every tensor has one row per image."""

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
    best: Tensor  # closest adversarial example
    distance: Tensor  # of `best`, infinite without one


@dataclass(frozen=True)
class CW(Attack):
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
        objective, best = CWHinge(self.criterion, self.confidence), batch.x.clone()
        if isinstance(self.criterion, FalseRejection):  # the prediction has to stay correct
            batch = replace(batch, target=batch.y)
        _, out = exact_value(batch.model, objective, batch.x, batch.y, *hinge_inputs(batch))
        success = self.criterion(out, batch.y)
        if not isinstance(self.criterion, Rejected):
            success &= logit_margin(out, batch.y, *hinge_inputs(batch)) >= self.confidence
        rows = (~success).nonzero()[:, 0]
        batch = batch.select(rows)
        s = self._initial_state(batch.x)
        while len(rows):
            x_adv = to_pixels(s.w)
            query = gradient(batch.model, objective, x_adv, batch.y, *hinge_inputs(batch))
            s, ended = self._update_best(s, batch, x_adv, query)
            s = self._start_next_search(s, batch.x, ended)
            s = self._adam_step(s, batch.x, x_adv, query.grad, ~ended)
            left = (s.searches < self.searches) & (s.total_steps < self.searches * self.steps)
            if not left.all():
                best[rows[~left]] = s.best[~left]
                rows, s, batch = rows[left], s.select(left), batch.select(left)
        return best

    def distances(
        self, model: Model, x: Tensor, y: Tensor, index: Tensor | None = None
    ) -> MinimalDistortion:
        """Return adversarial examples, success and distances (squared for L2)."""
        x_adv = self(model, x, y, index)
        with checked(model, x_adv, y) as (checked_model, images, labels):
            success = self.criterion(checked_model(images), labels)
        distance = self._distance(x_adv - x).where(success, torch.inf)
        return MinimalDistortion(x_adv, success, distance)

    def _distance(self, delta: Tensor) -> Tensor:
        """Return the reported distance, N: the squared L2 norm or the Linf norm."""
        flat = delta.flatten(1)
        return flat.square().sum(1) if self.norm == "L2" else flat.abs().amax(1)

    def _penalty(self, delta: Tensor, tau: Tensor) -> Tensor:
        """Return the minimised distance, N."""
        if self.norm == "Linf":
            return (delta.abs() - per_image(tau, delta)).clamp_min(0).flatten(1).sum(1)
        return self._distance(delta)

    def _penalty_gradient(self, delta: Tensor, tau: Tensor) -> Tensor:
        """Return the gradient of the minimised distance, shape of delta."""
        if self.norm == "L2":
            return 2 * delta
        if self.norm == "Linf":
            return delta.sign() * (delta.abs() > per_image(tau, delta))
        largest = delta.abs() == per_image(self._distance(delta), delta)
        return delta.sign() * largest / per_image(largest.flatten(1).sum(1), delta)

    def _initial_state(self, x: Tensor) -> CWState:
        """Return the state at the clean images."""
        zero = x.new_zeros(len(x))
        inf, zero_image = torch.full_like(zero, torch.inf), torch.zeros_like(x)
        return CWState(
            w=to_tanh_space(x), adam_mean=zero_image, adam_square=zero_image, step=zero,
            total_steps=zero, searches=zero, rate=torch.full_like(zero, self.rate),
            c=torch.full_like(zero, self.constant), low=zero, high=inf, tau=torch.ones_like(zero),
            succeeded=zero.bool(), window_loss=inf, best_loss=inf, best=x, distance=inf,
        )  # fmt: skip

    def _update_best(
        self, s: CWState, batch: AttackBatch, x_adv: Tensor, query: Gradient
    ) -> tuple[CWState, Tensor]:
        """Return the state with the best examples updated, and which searches have ended."""
        delta, value = x_adv - batch.x, query.value.to(batch.x.dtype)
        distance = self._distance(delta)
        candidate = (value <= 0) & self.criterion(query.out, batch.y)
        closer = candidate & (distance < s.distance)
        closer = verify_success(self.criterion, batch.model, x_adv, batch.y, closer)
        step = s.step + 1
        loss = torch.minimum(s.window_loss, self._penalty(delta, s.tau) + s.c * value)
        check = step % max(1, self.steps // 10) == 0
        stalled = check & (loss > PROGRESS * s.best_loss) if self.abort else torch.zeros_like(check)
        not_closer = candidate & (distance >= s.distance)
        s = replace(
            s, step=step, total_steps=s.total_steps + 1,
            succeeded=s.succeeded | closer | not_closer,
            best=x_adv.where(per_image(closer, x_adv), s.best),
            distance=distance.where(closer, s.distance),
            window_loss=torch.full_like(loss, torch.inf).where(check, loss),
            best_loss=torch.minimum(s.best_loss, loss).where(check, s.best_loss),
        )  # fmt: skip
        within = torch.zeros_like(candidate)
        if self.norm == "Linf":
            within = closer & (distance <= s.tau)
        return s, within | stalled | (step == self.steps)

    def _start_next_search(self, s: CWState, x: Tensor, ended: Tensor) -> CWState:
        """Return the state with a new search for the images whose last one has ended."""
        mask, zero = per_image(ended, x), torch.zeros_like(s.step)
        new = self._lower_tau(s, x) if self.norm == "Linf" else self._bisect_c(s, x)
        inf, zero_image = torch.full_like(zero, torch.inf), torch.zeros_like(x)
        new = replace(
            new, adam_mean=zero_image, adam_square=zero_image, step=zero, succeeded=zero.bool(),
            window_loss=inf, best_loss=inf,
        )  # fmt: skip
        merged = {}
        for f in fields(s):
            old_value, new_value = getattr(s, f.name), getattr(new, f.name)
            merged[f.name] = new_value.where(mask if new_value.ndim > 1 else ended, old_value)
        return CWState(**merged)

    def _bisect_c(self, s: CWState, x: Tensor) -> CWState:
        """Return the state at the clean image with the next c."""
        low, high = s.low.where(s.succeeded, s.c), s.c.where(s.succeeded, s.high)
        c = torch.where(high.isinf(), s.c * C_GROWTH, (low + high) / 2)
        return replace(s, w=to_tanh_space(x), c=c, low=low, high=high, searches=s.searches + 1)

    def _lower_tau(self, s: CWState, x: Tensor) -> CWState:
        """Return the state at the best image with a smaller tau; without success, a larger c."""
        within = s.distance <= s.tau
        never = s.distance.isinf()
        low = s.low.where(within | never, s.tau)
        tau = torch.maximum(TAU_SHRINK * s.distance, (low + s.distance) / 2).where(~never, s.tau)
        c = (s.c * C_GROWTH).where(never, s.c)
        rate = s.rate.where(within | never, s.rate / 2)  # smaller steps where tau is bisected
        searches = s.searches + (~within).to(s.searches.dtype)
        w = to_tanh_space(s.best)
        return replace(s, w=w, c=c, low=low, tau=tau, rate=rate, searches=searches)

    def _adam_step(
        self, s: CWState, x: Tensor, x_adv: Tensor, grad: Tensor, active: Tensor
    ) -> CWState:
        """Return the state after one step of Adam in tanh space for the active images."""
        loss_grad = per_image(s.c, x) * grad + self._penalty_gradient(x_adv - x, s.tau)
        loss_grad = loss_grad * pixel_derivative(s.w)
        mean = torch.lerp(loss_grad, s.adam_mean, BETAS[0])
        square = torch.lerp(loss_grad.square(), s.adam_square, BETAS[1])
        step = per_image(s.step.clamp_min(1), x)
        scale = (square / (1 - BETAS[1] ** step)).sqrt() + ADAM_EPS
        w = s.w - per_image(s.rate, x) * mean / (1 - BETAS[0] ** step) / scale
        mask = per_image(active, x)
        return replace(
            s, w=clamp_to_pixel_range(w).where(mask, s.w), adam_mean=mean.where(mask, s.adam_mean),
            adam_square=square.where(mask, s.adam_square),
        )  # fmt: skip


def hinge_inputs(batch: AttackBatch) -> tuple[Tensor, ...]:
    """Return the inputs of `CWHinge`: the class that should be predicted, if there is one."""
    return () if batch.target is None else (batch.target,)


def logit_margin(out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
    """Return the margin of the target over the other logits, or of the best wrong class, N."""
    if inputs:
        return label_entry(out.logits, inputs[0]) - best_wrong(out.logits, inputs[0])
    return best_wrong(out.logits, y) - label_entry(out.logits, y)


def to_tanh_space(x: Tensor) -> Tensor:
    """Return w with `to_pixels(w)` equal to x."""
    return ((2 * x - 1) / (1 + TANH_MARGIN)).atanh()


def to_pixels(w: Tensor) -> Tensor:
    """Return the image of w, clamped to [0, 1] against rounding."""
    return (((1 + TANH_MARGIN) * w.tanh() + 1) / 2).clamp(0, 1)


def pixel_derivative(w: Tensor) -> Tensor:
    """Return the derivative of the pixels with respect to w."""
    return (1 + TANH_MARGIN) / 2 * (1 - w.tanh().square())


def clamp_to_pixel_range(w: Tensor) -> Tensor:
    """Return w clamped to where pixels lie in [0, 1]."""
    bound = float(torch.tensor(1 / (1 + TANH_MARGIN), dtype=torch.float64).atanh())
    return w.clamp(-bound, bound)
