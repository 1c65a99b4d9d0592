"""Objectives for accepted errors: wrong and accepted at once, for any rejector.

    MinMargin(AcceptedError(RCon(), TPR(0.95)))        # the smallest margin; > 0 at a success
    MarginProduct(AcceptedError(Energy(), TPR(0.95)))  # P(wrong class) times soft acceptance
    RejectionObjective(Rejected(RCon(), TPR(0.95)))    # the opposite: make the model reject

Margins are divided by the norm of their gradient at the start, so no weights are needed.
"""

from abc import ABC
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from demur.attacks.criteria import RuleCriterion
from demur.attacks.objectives.objective import AttackStart, Objective, ObjectiveState
from demur.field_types import NonNegativeInt
from demur.output import Output, as_output, label_entry, log_probabilities, mask_label

ANY = -1  # in place of a target: the wrong class with the largest logit


@dataclass(frozen=True)
class MarginObjective(Objective, ABC):
    """An objective made of margins: one to be wrong and one to be accepted by each score.

    The margins of logits and scores have different units. Dividing each by the norm of its
    gradient at the start of the attack turns all of them into distances in pixel space (L2, to
    first order). The state of each image is its target and these gradient norms ("slopes").

    Args:
        criterion: The criterion with the rejector and its threshold.
    """

    criterion: RuleCriterion

    @property
    def n_inputs(self) -> int:
        return 2

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        target = (
            torch.full_like(start_point.y, ANY)
            if start_point.target is None
            else start_point.target
        )
        x = start_point.x_start.detach().requires_grad_()
        with torch.enable_grad():
            margins = self.unscaled(as_output(start_point.model(x)), start_point.y, target)
            slopes = [_slope(margin, x) for margin in margins.unbind(1)]
        return target, torch.stack(slopes, 1)

    def unscaled(self, out: Output, y: Tensor, target: Tensor) -> Tensor:
        """Return the margins in their own units, N, 1 + number of scores."""
        label = torch.where(target == ANY, best_wrong_class(out.logits, y), target)
        wrong = label_entry(out.logits, label) - label_entry(out.logits, y)
        accept = [
            score.accept_margin(out, t, label) for score, t in self.criterion.accept_rule.pairs
        ]
        return torch.stack([wrong, *(margin.to(wrong) for margin in accept)], 1)

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
        label = torch.where(target == ANY, best_wrong_class(out.logits, y), target)
        wrong = label_entry(log_probabilities(out), label)
        # Accept margins in the units of the logit margin.
        accept = self.margins(out, y, *inputs)[:, 1:] * slopes[:, :1].to(wrong)
        return wrong + logsigmoid(accept).sum(1)


@dataclass(frozen=True)
class RejectionObjective(Objective):
    """Minus the smallest accept margin of the criterion's scores: positive where rejected."""

    criterion: RuleCriterion

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        label = out.logits.argmax(-1)
        margins = [
            score.accept_margin(out, t, label) for score, t in self.criterion.accept_rule.pairs
        ]
        return -torch.stack(margins, 1).amin(1)


def best_wrong_class(logits: Tensor, y: Tensor) -> Tensor:
    """Return the wrong class with the largest logit, N."""
    return mask_label(logits, y).argmax(-1)


def _slope(margin: Tensor, x: Tensor) -> Tensor:
    """Return the L2 norm of the margin's gradient per image, N; 1 where there is no gradient."""
    grad = None
    if margin.requires_grad:
        (grad,) = torch.autograd.grad(margin.sum(), x, retain_graph=True, allow_unused=True)
    if grad is None:
        return torch.ones_like(margin)
    norm = grad.flatten(1).norm(dim=1).to(margin)
    return torch.where((norm > 0) & norm.isfinite(), norm, torch.ones_like(norm))
