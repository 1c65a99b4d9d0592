"""Goals of an attacker who must be wrong and accepted at once, whatever the rule.

MinMargin(AcceptedError(RCon(), TPR(0.95)))          # the smallest margin: positive exactly where it slips
MarginProduct(AcceptedError(Energy(), TPR(0.95)))      # the wrong probability times how surely it is accepted
RejectionObjective(Rejected(RCon(), TPR(0.95)))     # the other way round: have an answer refused

Margins of scores have units of their own. Each is counted in the slope it has where the attack
starts, so that all are distances in the image and no weight has to be chosen.
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

ANY = -1  # in place of a target: whichever wrong class is the best


@dataclass(frozen=True)
class MarginObjective(Objective, ABC):
    """A goal made of margins: to be wrong, and to be accepted by each score of the rule.

    It remembers for each image the target, if there is one, and the slope of each margin.
    """

    rule: RuleCriterion

    @property
    def n_inputs(self) -> int:
        """The target and the slopes."""
        return 2

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """The target, or none, and how steep each margin is at the start."""
        target = (
            torch.full_like(start_point.y, ANY)
            if start_point.target is None
            else start_point.target
        )
        x = start_point.x_start.detach().requires_grad_()
        with torch.enable_grad():
            margins = self.raw(as_output(start_point.model(x)), start_point.y, target)
            slopes = [_slope(margin, x) for margin in margins.unbind(1)]
        return target, torch.stack(slopes, 1)

    def raw(self, out: Output, y: Tensor, target: Tensor) -> Tensor:
        """The margins in their own units: N, one of being wrong and one a score."""
        label = torch.where(target == ANY, best_wrong_class(out.logits, y), target)
        lead = label_entry(out.logits, label) - label_entry(out.logits, y)
        rooms = [score.accept_margin(out, t, label) for score, t in self.rule.rule.pairs]
        return torch.stack([lead, *(room.to(lead) for room in rooms)], 1)

    def margins(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The margins as distances."""
        target, slopes = inputs
        return self.raw(out, y, target) / slopes.to(out.logits)


@dataclass(frozen=True)
class MinMargin(MarginObjective):
    """The smallest of the margins: positive exactly where an image is wrong and accepted."""

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """By how much the attack has got through."""
        return self.margins(out, y, *inputs).amin(1)


@dataclass(frozen=True)
class SingleMargin(MarginObjective):
    """One of the margins alone."""

    index: NonNegativeInt = 0

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The margin at that place."""
        return self.margins(out, y, *inputs)[:, self.index]


@dataclass(frozen=True)
class MarginProduct(MarginObjective):
    """The log of: the wrong probability, times for each score a chance to be accepted.

    That chance is a half at the threshold and goes to one with the margin.
    """

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The sum of the logs, with scores in the units of logits."""
        target, slopes = inputs
        label = torch.where(target == ANY, best_wrong_class(out.logits, y), target)
        wrong = label_entry(log_probabilities(out), label)
        rooms = self.margins(out, y, *inputs)[:, 1:] * slopes[:, :1].to(wrong)
        return wrong + logsigmoid(rooms).sum(1)


@dataclass(frozen=True)
class RejectionObjective(Objective):
    """By how much an answer is refused: minus the smallest room that a score of the rule leaves."""

    rule: RuleCriterion

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """How far outside the accepted set the answer is."""
        label = out.logits.argmax(-1)
        rooms = [score.accept_margin(out, t, label) for score, t in self.rule.rule.pairs]
        return -torch.stack(rooms, 1).amin(1)


def best_wrong_class(logits: Tensor, y: Tensor) -> Tensor:
    """The wrong class that each image is nearest to."""
    return mask_label(logits, y).argmax(-1)


def _slope(margin: Tensor, x: Tensor) -> Tensor:
    """How steep a margin is in each image; one where it gives no gradient."""
    grad = None
    if margin.requires_grad:
        (grad,) = torch.autograd.grad(margin.sum(), x, retain_graph=True, allow_unused=True)
    if grad is None:
        return torch.ones_like(margin)
    steep = grad.flatten(1).norm(dim=1).to(margin)
    return torch.where((steep > 0) & steep.isfinite(), steep, torch.ones_like(steep))
