"""Goals of an attacker who must be wrong and accepted at once, whatever the rule.

Least(Slips(RCon(), TPR(0.95)))          # the smallest margin: positive exactly where it slips
Product(Slips(Energy(), TPR(0.95)))      # the wrong probability times how surely it is accepted
Doubt(Unanswered(RCon(), TPR(0.95)))     # the other way round: have an answer refused

Margins of scores have units of their own. Each is counted in the slope it has where the attack
starts, so that all are distances in the image and no weight has to be chosen.
"""

from abc import ABC
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from demur.attacks.criteria import Ruled
from demur.attacks.goals.goal import Goal, Kept, Moment
from demur.declared import Natural
from demur.output import Output, at, elsewhere, log_probabilities, output_of

ANY = -1  # in place of a target: whichever wrong class is the best


@dataclass(frozen=True)
class Passing(Goal, ABC):
    """A goal made of margins: to be wrong, and to be accepted by each score of the rule.

    It remembers for each image the target, if there is one, and the slope of each margin.
    """

    rule: Ruled

    @property
    def arity(self) -> int:
        """The target and the slopes."""
        return 2

    def begin(self, moment: Moment) -> Kept:
        """The target, or none, and how steep each margin is at the start."""
        target = torch.full_like(moment.y, ANY) if moment.target is None else moment.target
        x = moment.x_start.detach().requires_grad_()
        with torch.enable_grad():
            margins = self.raw(output_of(moment.model(x)), moment.y, target)
            slopes = [_slope(margin, x) for margin in margins.unbind(1)]
        return target, torch.stack(slopes, 1)

    def raw(self, out: Output, y: Tensor, target: Tensor) -> Tensor:
        """The margins in their own units: N, one of being wrong and one a score."""
        label = torch.where(target == ANY, best_wrong_class(out.logits, y), target)
        lead = at(out.logits, label) - at(out.logits, y)
        rooms = [score.room(out, t, label) for score, t in self.rule.rule.pairs]
        return torch.stack([lead, *(room.to(lead) for room in rooms)], 1)

    def margins(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The margins as distances."""
        target, slopes = given
        return self.raw(out, y, target) / slopes.to(out.logits)


@dataclass(frozen=True)
class Least(Passing):
    """The smallest of the margins: positive exactly where an image is wrong and accepted."""

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """By how much the attack has got through."""
        return self.margins(out, y, *given).amin(1)


@dataclass(frozen=True)
class One(Passing):
    """One of the margins alone."""

    place: Natural = 0

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The margin at that place."""
        return self.margins(out, y, *given)[:, self.place]


@dataclass(frozen=True)
class Product(Passing):
    """The log of: the wrong probability, times for each score a chance to be accepted.

    That chance is a half at the threshold and goes to one with the margin.
    """

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The sum of the logs, with scores in the units of logits."""
        target, slopes = given
        label = torch.where(target == ANY, best_wrong_class(out.logits, y), target)
        wrong = at(log_probabilities(out), label)
        rooms = self.margins(out, y, *given)[:, 1:] * slopes[:, :1].to(wrong)
        return wrong + logsigmoid(rooms).sum(1)


@dataclass(frozen=True)
class Doubt(Goal):
    """By how much an answer is refused: minus the smallest room that a score of the rule leaves."""

    rule: Ruled

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """How far outside the accepted set the answer is."""
        label = out.logits.argmax(-1)
        rooms = [score.room(out, t, label) for score, t in self.rule.rule.pairs]
        return -torch.stack(rooms, 1).amin(1)


def best_wrong_class(logits: Tensor, y: Tensor) -> Tensor:
    """The wrong class that each image is nearest to."""
    return elsewhere(logits, y).argmax(-1)


def _slope(margin: Tensor, x: Tensor) -> Tensor:
    """How steep a margin is in each image; one where it gives no gradient."""
    grad = None
    if margin.requires_grad:
        (grad,) = torch.autograd.grad(margin.sum(), x, retain_graph=True, allow_unused=True)
    if grad is None:
        return torch.ones_like(margin)
    steep = grad.flatten(1).norm(dim=1).to(margin)
    return torch.where((steep > 0) & steep.isfinite(), steep, torch.ones_like(steep))
