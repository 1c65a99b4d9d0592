"""The least change that breaks an image (Carlini and Wagner 2017).

    CW("L2").distances(model, x, y)                         # images, which broke, how far they are
    CW("Linf", criterion=AcceptedError(RCon(), TPR(0.95)))          # wrong and accepted, as near as can be

Adam goes down distance + c * shortfall, the shortfall being what an image lacks to be broken; c
grows tenfold until it breaks, then is bisected. Every image has its own c, steps and end.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from demur.attacks.attack import Attack
from demur.attacks.batch import AttackBatch, PerImageState, verify_success
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
from demur.output import Output, as_output, label_entry, prediction

WALL = 0.05  # tanh reaches this far beyond the pixel range, else pixels at 0 and 1 cannot move
SLACK = 1e-5  # of logits and thresholds: a batch of another size rounds differently
SHRINK = 0.9  # of the largest change, after each success
GROWTH = 10.0  # of c, after each failure
PROGRESS = 0.9999  # the least loss of a tenth of the steps must fall below this share
BETAS, TINY = (0.9, 0.999), 1e-8  # Adam's


class MinimalDistortion(NamedTuple):
    """What an attack of least change found; the distance of an unbroken image is infinite."""

    x_adv: Tensor
    broken: Tensor  # N
    distance: Tensor  # N


@dataclass(frozen=True)
class CWHinge:
    """What each image lacks to be broken, 0 where nothing: a lead in logits, and scores."""

    criterion: Criterion
    confidence: float

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The missing lead plus what is missing at each threshold."""
        slack = SLACK * out.logits.detach().abs().amax(-1)
        lacking = (self.confidence + slack - lead(out, y, *inputs)).clamp_min(0)
        if not isinstance(self.criterion, RuleCriterion):
            return lacking
        if isinstance(self.criterion, Rejected):  # whatever the answer would be
            return self._unruly(out, self.criterion, prediction(out))
        label = inputs[0] if inputs else best_wrong_class(out.logits, y)
        return lacking + self._unruly(out, self.criterion, label)

    def _unruly(self, out: Output, criterion: RuleCriterion, label: Tensor) -> Tensor:
        """What is missing for the rule's verdict; to be refused by one score is enough."""
        pairs = criterion.rule.pairs
        if isinstance(criterion, AcceptedError):
            under = [
                SLACK * max(1, abs(t)) - score.accept_margin(out, t, label) for score, t in pairs
            ]
            return torch.stack(under).clamp_min(0).sum(0)
        over = [SLACK * max(1, abs(t)) + score.accept_margin(out, t, label) for score, t in pairs]
        return torch.stack(over).amin(0).clamp_min(0)


@dataclass
class CWState(PerImageState):
    """Images on their way; every tensor has one row per image."""

    w: Tensor  # the image before tanh
    mean: Tensor  # Adam's
    square: Tensor  # Adam's
    age: Tensor  # steps in this search
    spent: Tensor  # steps in all searches
    searches: Tensor  # that ended
    rate: Tensor
    c: Tensor
    low: Tensor  # the largest c, or tau, that failed
    high: Tensor  # the smallest c that broke the image
    tau: Tensor  # changes up to here are free (Linf)
    found: Tensor  # broken in this search
    least: Tensor  # loss since the last check
    before: Tensor  # the least loss up to the last check
    best: Tensor
    distance: Tensor  # of the best


@dataclass(frozen=True)
class CW(Attack):
    """The nearest broken image, or the image itself where none is found.

    L2: the squared distance. Linf: the sum of all change beyond tau, tau falling with each success.
    Linf-adam: the largest change itself, as the paper's code does; slower to settle.
    """

    norm: Literal["L2", "Linf", "Linf-adam"] = "L2"
    searches: PositiveInt = 9
    steps: PositiveInt = 1000
    rate: Positive = 0.005
    constant: Positive = 0.01
    confidence: NonNegative = 0.0
    criterion: Criterion = Misclassified()
    abort: bool = True  # a search that makes no progress

    def run(self, batch: AttackBatch, stream: Stream) -> Tensor:
        """The nearest broken images; one that is broken as it stands comes back as it is."""
        objective, best = CWHinge(self.criterion, self.confidence), batch.x.clone()
        if isinstance(self.criterion, FalseRejection):  # the right class should go on leading
            batch = replace(batch, target=batch.y)
        _, out = exact_value(batch.model, objective, batch.x, batch.y, *aim(batch))
        broken = self.criterion(out, batch.y)
        if not isinstance(self.criterion, Rejected):
            broken &= lead(out, batch.y, *aim(batch)) >= self.confidence
        alive = (~broken).nonzero()[:, 0]
        batch = batch.select(alive)
        d = self._begun(batch.x)
        while len(alive):
            x_adv = pixels(d.w)
            look = gradient(batch.model, objective, x_adv, batch.y, *aim(batch))
            d, over = self._noted(d, batch, x_adv, look)
            d = self._moved(self._renewed(d, batch.x, over), batch.x, x_adv, look.grad, ~over)
            left = (d.searches < self.searches) & (d.spent < self.searches * self.steps)
            if not left.all():
                best[alive[~left]] = d.best[~left]
                alive, d, batch = alive[left], d.select(left), batch.select(left)
        return best

    def distances(
        self, model: Model, x: Tensor, y: Tensor, index: Tensor | None = None
    ) -> MinimalDistortion:
        """The attacked images, which of them are broken, and how far each had to go."""
        x_adv = self(model, x, y, index)
        with torch.no_grad():
            broken = self.criterion(as_output(model(x_adv)), y)
        return MinimalDistortion(x_adv, broken, self._size(x_adv - x).where(broken, torch.inf))

    def _size(self, delta: Tensor) -> Tensor:
        """The distance as it is reported."""
        flat = delta.flatten(1)
        return flat.square().sum(1) if self.norm == "L2" else flat.abs().amax(1)

    def _penalty(self, delta: Tensor, tau: Tensor) -> Tensor:
        """The distance as it is minimised."""
        if self.norm == "Linf":
            return (delta.abs() - per_image(tau, delta)).clamp_min(0).flatten(1).sum(1)
        return self._size(delta)

    def _pull(self, delta: Tensor, tau: Tensor) -> Tensor:
        """The gradient of what is minimised."""
        if self.norm == "L2":
            return 2 * delta
        if self.norm == "Linf":
            return delta.sign() * (delta.abs() > per_image(tau, delta))
        top = delta.abs() == per_image(self._size(delta), delta)
        return delta.sign() * top / per_image(top.flatten(1).sum(1), delta)

    def _begun(self, x: Tensor) -> CWState:
        """Everything at the clean images."""
        zero = x.new_zeros(len(x))
        inf, none = torch.full_like(zero, torch.inf), torch.zeros_like(x)
        return CWState(
            w=unbounded(x), mean=none, square=none, age=zero, spent=zero, searches=zero,
            rate=torch.full_like(zero, self.rate), c=torch.full_like(zero, self.constant),
            low=zero, high=inf, tau=torch.ones_like(zero), found=zero.bool(),
            least=inf, before=inf, best=x, distance=inf,
        )  # fmt: skip

    def _noted(
        self, d: CWState, batch: AttackBatch, x_adv: Tensor, look: Gradient
    ) -> tuple[CWState, Tensor]:
        """The best so far, and whose search is over."""
        delta, value = x_adv - batch.x, look.value.to(batch.x.dtype)
        size = self._size(delta)
        hit = (value <= 0) & self.criterion(look.out, batch.y)
        closer = hit & (size < d.distance)
        closer = verify_success(self.criterion, batch.model, x_adv, batch.y, closer)
        age = d.age + 1
        least = torch.minimum(d.least, self._penalty(delta, d.tau) + d.c * value)
        check = age % max(1, self.steps // 10) == 0
        stalled = check & (least > PROGRESS * d.before) if self.abort else torch.zeros_like(check)
        d = replace(
            d, age=age, spent=d.spent + 1, found=d.found | closer | (hit & (size >= d.distance)),
            best=x_adv.where(per_image(closer, x_adv), d.best),
            distance=size.where(closer, d.distance),
            least=torch.full_like(least, torch.inf).where(check, least),
            before=torch.minimum(d.before, least).where(check, d.before),
        )  # fmt: skip
        within = closer & (size <= d.tau) if self.norm == "Linf" else torch.zeros_like(hit)
        return d, within | stalled | (age == self.steps)

    def _renewed(self, d: CWState, x: Tensor, over: Tensor) -> CWState:
        """The next search of every image whose last one is over."""
        wide, zero = per_image(over, x), torch.zeros_like(d.age)
        new = self._smaller(d, x) if self.norm == "Linf" else self._bisected(d, x)
        new = replace(
            new, mean=torch.zeros_like(x), square=torch.zeros_like(x), age=zero, found=zero.bool(),
            least=torch.full_like(zero, torch.inf), before=torch.full_like(zero, torch.inf),
        )  # fmt: skip
        chosen = {}
        for f in fields(d):
            now, then = getattr(d, f.name), getattr(new, f.name)
            chosen[f.name] = then.where(wide if then.ndim > 1 else over, now)
        return CWState(**chosen)

    def _bisected(self, d: CWState, x: Tensor) -> CWState:
        """From the clean image with another c."""
        low, high = d.low.where(d.found, d.c), d.c.where(d.found, d.high)
        c = torch.where(high.isinf(), d.c * GROWTH, (low + high) / 2)
        return replace(d, w=unbounded(x), c=c, low=low, high=high, searches=d.searches + 1)

    def _smaller(self, d: CWState, x: Tensor) -> CWState:
        """From the best image with a smaller tau, or from the clean one with a larger c."""
        within = d.distance <= d.tau
        never = d.distance.isinf()
        low = d.low.where(within | never, d.tau)
        tau = torch.maximum(SHRINK * d.distance, (low + d.distance) / 2).where(~never, d.tau)
        c = (d.c * GROWTH).where(never, d.c)
        rate = d.rate.where(within | never, d.rate / 2)  # finer steps where the bracket halves
        searches = d.searches + (~within).to(d.searches.dtype)
        return replace(d, w=unbounded(d.best), c=c, low=low, tau=tau, rate=rate, searches=searches)

    def _moved(self, d: CWState, x: Tensor, x_adv: Tensor, grad: Tensor, who: Tensor) -> CWState:
        """One step of Adam in tanh space for who goes on."""
        gradient_only = per_image(d.c, x) * grad + self._pull(x_adv - x, d.tau)
        gradient_only = gradient_only * stretch(d.w)
        mean = torch.lerp(gradient_only, d.mean, BETAS[0])
        square = torch.lerp(gradient_only.square(), d.square, BETAS[1])
        age = per_image(d.age.clamp_min(1), x)
        size = (square / (1 - BETAS[1] ** age)).sqrt() + TINY
        w = d.w - per_image(d.rate, x) * mean / (1 - BETAS[0] ** age) / size
        wide = per_image(who, x)
        return replace(
            d, w=within_range(w).where(wide, d.w), mean=mean.where(wide, d.mean),
            square=square.where(wide, d.square),
        )  # fmt: skip


def aim(batch: AttackBatch) -> tuple[Tensor, ...]:
    """What the shortfall is given: the class that should lead, if there is one."""
    return () if batch.target is None else (batch.target,)


def lead(out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
    """By how much the wanted class leads, or the best wrong one where any will do."""
    if inputs:
        return label_entry(out.logits, inputs[0]) - best_wrong(out.logits, inputs[0])
    return best_wrong(out.logits, y) - label_entry(out.logits, y)


def unbounded(x: Tensor) -> Tensor:
    """Pixels before tanh."""
    return ((2 * x - 1) / (1 + WALL)).atanh()


def pixels(w: Tensor) -> Tensor:
    """The image; rounding does not take it out of the pixel range."""
    return (((1 + WALL) * w.tanh() + 1) / 2).clamp(0, 1)


def stretch(w: Tensor) -> Tensor:
    """How fast pixels move with w."""
    return (1 + WALL) / 2 * (1 - w.tanh().square())


def within_range(w: Tensor) -> Tensor:
    """w brought back to where pixels lie in [0, 1]."""
    wall = float(torch.tensor(1 / (1 + WALL), dtype=torch.float64).atanh())
    return w.clamp(-wall, wall)
