"""Adaptive objectives: they use the score of a rejector or an auxiliary output."""

import math
from abc import ABC
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot, softplus, softsign

from demur.attacks.attack import (
    AcceptedError,
    Criterion,
    FalseRejection,
    Misclassified,
    Rejected,
    RuleCriterion,
)
from demur.attacks.objectives.classification import (
    ANY,
    CE,
    AttackStart,
    Objective,
    ObjectiveState,
    Targeted,
    best_wrong,
)
from demur.errors import BadInput, NoGradientError
from demur.output import Output, as_output, label_entry, log_probabilities, mask_label
from demur.rejectors.certainty import (
    Construction,
    RRLossKind,
    log_con,
    log_tcon,
    rectifier_logit,
    rr_loss_per_image,
    tcon,
)
from demur.rejectors.rule import Rejector, Score, as_score
from demur.spec import later
from demur.spec.field_types import NonNegative, NonNegativeInt, Positive, UnitInterval

Form = Literal["paper", "authors"]  # as the R-Con paper ran a method, or as its authors did
PENALTY = 4.0  # of a violated margin, in units of the score's slope
FIRST_WIDTH, LAST_WIDTH = 0.5, 0.02  # of the softplus: share of the start's margin, decay
MIDDLE = 0.5  # any threshold does where only the gradient of an accept margin is used


@dataclass(frozen=True)
class PlusLogScore(Objective):
    """Wrong and accepted at once: base objective + eta * log score.

    Args:
        rejector: The rejector or its score.
        eta: The weight of the log score.
        base_objective: The objective that makes the prediction wrong.
    """

    rejector: Rejector | Score
    eta: NonNegative = 1.0
    base_objective: Objective = CE()

    @property
    def parts(self) -> tuple[Objective, ...]:
        return (self.base_objective,)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        log_score = as_score(self.rejector).log_score(out)
        return self.base_objective(out, y, *inputs) + self.eta * log_score


@dataclass(frozen=True)
class ScoreObjective(Objective):
    """The score of a rejector, without the log of `PlusLogScore`."""

    rejector: Rejector | Score

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return as_score(self.rejector)(out)


@dataclass(frozen=True)
class RRLoss(Objective):
    """The training loss of A, Eq. 7: L_RR = BCE(R-Con, T-Con), with T-Con fixed.

    Maximising it moves R-Con away from T-Con in either direction. The fields are those of
    `methods.RR`.
    """

    tau: Positive = 1.0
    construction: Construction = field(default="product", metadata=later("product"))
    rr_loss: RRLossKind = field(default="bce", metadata=later("bce"))

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        true_confidence = tcon(out, y, self.tau).detach()
        return rr_loss_per_image(out, y, true_confidence, self.construction, self.rr_loss, self.tau)


@dataclass(frozen=True)
class XiObjective(Objective):
    """The xi-error of Definition 1, 2 |A - A*|, where A* makes R-Con equal T-Con."""

    tau: Positive = 1.0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        log_a_star = log_tcon(out, y, self.tau) - log_con(out, self.tau)
        logit = rectifier_logit(out)
        # Near 1, subtract both from 1 first: the difference keeps its digits and its gradient.
        from_one = log_a_star.expm1() + (-logit).sigmoid()
        from_zero = log_a_star.exp() - logit.sigmoid()
        return 2 * torch.where(log_a_star > -math.log(2), from_one, from_zero).abs()


@dataclass(frozen=True)
class CARLObjective(Objective):
    """CARL's loss: minus the log probability of the true class or abstaining."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        abstain = rectifier_logit(out)
        logits = out.logits.to(abstain)
        total = torch.logaddexp(logits.logsumexp(-1), abstain)
        return total - torch.logaddexp(label_entry(logits, y), abstain)


@dataclass(frozen=True)
class CARLMargin(Objective):
    """The largest wrong logit minus the larger of the true and the abstain logit."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return best_wrong(out.logits, y) - torch.maximum(
            label_entry(out.logits, y), rectifier_logit(out)
        )


@dataclass(frozen=True)
class RejectionHinge(Objective):
    """ATRO's loss: the larger of the loss of a wrong prediction and the loss of a rejection.

    Args:
        cost: The cost of a rejection, below 0.5.
        form: "authors" is a squared hinge on logits. "paper" uses probabilities, without the
            square and without clamping at zero.
    """

    cost: UnitInterval = 0.3
    form: Form = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost >= 0.5:
            raise BadInput(
                f"RejectionHinge.cost must be below 0.5, the error rate of a coin, not {self.cost}"
            )

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        r = rectifier_logit(out).tanh()
        by_class = log_probabilities(out).exp() if self.form == "paper" else out.logits
        signs = 2 * one_hot(y, by_class.shape[-1]).to(by_class) - 1
        wrong = (1 + (r[:, None] - signs * by_class) / 2).mean(-1)
        rejected = self.cost * (1 - r / (1 - 2 * self.cost))
        loss = torch.maximum(wrong, rejected)
        return loss if self.form == "paper" else loss.clamp_min(0).square()


@dataclass(frozen=True)
class MarginObjective(Objective, ABC):
    """An objective made of margins: one to be wrong and one to be accepted by each score.

    The margins of logits and scores have different units. Dividing each by the norm of its gradient
    at the start of the attack turns all of them into distances in pixel space (L2, to first order).
    The state of each image is its target and these gradient norms ("slopes").
    """

    own_inputs: ClassVar[int] = 2

    criterion: RuleCriterion

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        target = start_point.target_or_any()
        _, slopes = with_slopes(lambda out: self.unscaled(out, start_point.y, target), start_point)
        return target, slopes

    def unscaled(self, out: Output, y: Tensor, target: Tensor) -> Tensor:
        """Return the margins in their own units, N, 1 + number of scores."""
        label = target_label(out, y, target)
        wrong = label_entry(out.logits, label) - label_entry(out.logits, y)
        accept = self.criterion.accept_rule.accept_margins(out, label)
        return torch.cat((wrong[:, None], accept.to(wrong)), 1)

    def margins(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """Return the margins divided by their slopes, N, 1 + number of scores."""
        target, slopes = inputs
        return self.unscaled(out, y, target) / slopes.to(out.logits)


@dataclass(frozen=True)
class MinMargin(MarginObjective):
    """The smallest margin: positive exactly at an accepted error."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return self.margins(out, y, *inputs).amin(1)


@dataclass(frozen=True)
class SingleMargin(MarginObjective):
    """One margin: index 0 is the wrong class, index i > 0 the i-th score of the criterion."""

    index: NonNegativeInt = 0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return self.margins(out, y, *inputs)[:, self.index]


@dataclass(frozen=True)
class MarginProduct(MarginObjective):
    """log P(wrong class) + sum of log sigmoid(accept margin) over the scores.

    The sigmoid is a soft acceptance: one half at the threshold, near one far inside.
    """

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        target, slopes = inputs
        wrong = label_entry(log_probabilities(out), target_label(out, y, target))
        # Accept margins in the units of the logit margin.
        accept = self.margins(out, y, *inputs)[:, 1:] * slopes[:, :1].to(wrong)
        return wrong + logsigmoid(accept).sum(1)


@dataclass(frozen=True)
class RejectionObjective(Objective):
    """Minus the smallest accept margin of the criterion's scores: positive where rejected."""

    criterion: RuleCriterion

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return -self.criterion.accept_rule.accept_margins(out, out.logits.argmax(-1)).amin(1)


@dataclass(frozen=True)
class TargetedScore(Objective):
    """The score, minus a penalty while the target is not predicted or a gate is closed.

        value = score - PENALTY * sum of softplus(-margin)

    over the margins of the target over the other classes and of the gates of a coupled rejector.
    Each quantity is measured from its value at the start or from zero, in units of its slope at the
    start: pixels, to first order. The softplus sharpens with the steps, so that the search ends on
    the boundary where the score is highest there. Without a target, the best wrong class is the
    target.
    """

    own_inputs: ClassVar[int] = 4

    rejector: Rejector | Score

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        y, target = start_point.y, start_point.target_or_any()
        margins, slopes = with_slopes(lambda out: self._margins(out, y, target), start_point)
        start = margins / slopes
        width = start[:, :-1].abs().amax(1)
        return target, torch.cat((torch.zeros_like(start[:, :-1]), start[:, -1:]), 1), slopes, width

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        *rest, width = objective_state
        return *rest, width * (FIRST_WIDTH * LAST_WIDTH ** (step / steps))

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        margins, width = self._scaled(out, y, *inputs), inputs[-1]
        width = width.to(margins)[:, None].clamp_min(torch.finfo(margins.dtype).eps)
        penalty = (width * softplus(-margins[:, :-1] / width)).sum(1)
        return margins[:, -1] - PENALTY * penalty

    def rank(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """Return a value above 0 that grows with the score if all margins hold, else below 0."""
        margins = self._scaled(out, y, *inputs)
        least = margins[:, :-1].amin(1)
        return torch.where(least >= 0, 1 + softsign(margins[:, -1]), least)

    def _margins(self, out: Output, y: Tensor, target: Tensor) -> Tensor:
        """Return the margins of the target, the gates and the score, N, 2 + gates."""
        label = target_label(out, y, target)
        over_others = label_entry(out.logits, label) - best_wrong(out.logits, label)
        accept = as_score(self.rejector).rule(MIDDLE).accept_margins(out, label)
        return torch.cat((over_others[:, None], accept.to(over_others)), 1)

    def _scaled(
        self, out: Output, y: Tensor, target: Tensor, start: Tensor, slopes: Tensor, _: Tensor
    ) -> Tensor:
        return self._margins(out, y, target) / slopes.to(out.logits) - start.to(out.logits)


@dataclass(frozen=True)
class TargetedLogScore(Targeted):
    """The log score, minus how far the target's logit lies below the largest one.

    Where the target is predicted this is the log score.
    """

    rejector: Rejector | Score

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return as_score(self.rejector).log_score(out) - _below_largest(out, inputs[0])

    def rank(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """Return as `TargetedScore.rank` does, above 0 where the target is predicted."""
        score, below = as_score(self.rejector), _below_largest(out, inputs[0])
        reached = (below <= 0) & (score(out) > -torch.inf)  # the gates are open
        return torch.where(reached, 1 + softsign(score.log_score(out)), -below)


def _below_largest(out: Output, target: Tensor) -> Tensor:
    """Return how far the target's logit lies below the largest one, N."""
    return out.logits.amax(-1) - label_entry(out.logits, target)


@dataclass(frozen=True)
class SuccessProbability(Objective):
    """Product of sigmoid(margin / width) over the margins that a success of the criterion needs.

    For a randomised model its mean over passes is a smooth form of the share of successful passes.
    A width near the standard deviation of a margin over passes gives the weight to those passes
    whose decision a small step can change. The state of each image is its target and the widths.
    """

    own_inputs: ClassVar[int] = 2

    criterion: Criterion = Misclassified()

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        y, target = start_point.y, start_point.target_or_any()
        margins = self.margins(start_point.output(start_point.x_start), y, target)
        return target, self.widths(margins[None])

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        target, widths = inputs
        return logsigmoid(self.margins(out, y, target) / widths.to(out.logits)).sum(1).exp()

    def margins(self, out: Output, y: Tensor, target: Tensor) -> Tensor:
        """Return margins that are all positive exactly at a success, N, number of margins."""
        match self.criterion:
            case AcceptedError() as criterion:
                return MinMargin(criterion).unscaled(out, y, target)
            case Rejected() as criterion:
                return RejectionObjective(criterion)(out, y)[:, None]
            case FalseRejection() as criterion:
                right = label_entry(out.logits, y) - best_wrong(out.logits, y)
                return torch.stack([right, RejectionObjective(criterion)(out, y)], 1)
        label = target_label(out, y, target)
        return (label_entry(out.logits, label) - label_entry(out.logits, y))[:, None]

    @staticmethod
    def widths(margins: Tensor) -> Tensor:
        """Return widths, N, margins, from the margins of several passes: passes, N, margins.

        A width is at least an eighth of the mean margin: the sigmoid of no pass underflows.
        """
        width = torch.hypot(margins.std(0, correction=0), margins.mean(0) / 8)
        return width.nan_to_num(1, 1).clamp_min(1e-12)


def target_label(out: Output, y: Tensor, target: Tensor) -> Tensor:
    """Return the target classes, or the wrong class with the largest logit where it is ANY, N."""
    return torch.where(target == ANY, best_wrong_class(out.logits, y), target)


def best_wrong_class(logits: Tensor, y: Tensor) -> Tensor:
    """Return the wrong class with the largest logit, N."""
    return mask_label(logits, y).argmax(-1)


def with_slopes(
    margins: Callable[[Output], Tensor], start_point: AttackStart
) -> tuple[Tensor, Tensor]:
    """Return margins at the start of an attack and the norms of their gradients, N, M each."""
    x = start_point.x_start.detach().requires_grad_()
    with torch.enable_grad():
        found = margins(as_output(start_point.model(x)))
        slopes = [slope(margin, x) for margin in found.unbind(1)]
    return found.detach(), torch.stack(slopes, 1)


def slope(margin: Tensor, x: Tensor) -> Tensor:
    """Return the L2 norm of the margin's gradient per image, N; 1 where there is no gradient."""
    grad = None
    if margin.requires_grad:
        with suppress(NoGradientError):
            (grad,) = torch.autograd.grad(margin.sum(), x, retain_graph=True, allow_unused=True)
    if grad is None:
        return torch.ones_like(margin)
    norm = grad.flatten(1).norm(dim=1).to(margin)
    return torch.where((norm > 0) & norm.isfinite(), norm, torch.ones_like(norm))
