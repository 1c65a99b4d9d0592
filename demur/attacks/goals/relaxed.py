"""Goals that remember the probabilities before the attack.

Relaxed()     # GAMA's (Sriramanan et al. 2020): a margin of probabilities, and a fading distance
KL()          # TRADES' (Zhang et al. 2019): away from the answer to the clean image

Relaxed's distance to the probabilities at the noisy start, whose weight falls to nothing over the
first steps, gives a gradient where the margin alone has none.
"""

from dataclasses import dataclass

from torch import Tensor

from demur.attacks.goals.goal import Goal, Kept, Moment
from demur.attacks.goals.untargeted import best_wrong
from demur.declared import Count, NonNegative
from demur.output import Output, at, log_probabilities


@dataclass(frozen=True)
class Relaxed(Goal):
    """The best wrong probability minus the true one, plus a fading distance to the start's."""

    weight: NonNegative = 50.0
    fade: Count = 25  # steps until nothing is left of it

    @property
    def arity(self) -> int:
        """The probabilities at the start, and the weight of the step."""
        return 2

    def begin(self, moment: Moment) -> Kept:
        """The probabilities at the noisy start, and room for the weight."""
        start = log_probabilities(moment.seen(moment.x_start)).exp()
        return start, start.new_zeros(len(start))

    def given(self, kept: Kept, step: int, steps: int) -> Kept:
        """The probabilities at the start and how much their distance counts now."""
        start, room = kept
        return start, room + self.weight * max(0.0, 1 - step / self.fade)

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """The margin plus the weighted distance."""
        start, weight = given
        now = log_probabilities(out).exp()
        return best_wrong(now, y) - at(now, y) + weight * ((start - now) ** 2).sum(-1)


@dataclass(frozen=True)
class KL(Goal):
    """The divergence of the answer from that to the clean image, which is held still: TRADES'."""

    @property
    def arity(self) -> int:
        """The log probabilities of the clean image."""
        return 1

    def begin(self, moment: Moment) -> Kept:
        """The log probabilities of the clean image."""
        return (log_probabilities(moment.seen(moment.x)),)

    def __call__(self, out: Output, y: Tensor, *given: Tensor) -> Tensor:
        """What is lost by taking the one for the other."""
        return divergence(given[0], log_probabilities(out))


def divergence(true: Tensor, other: Tensor) -> Tensor:
    """KL divergence of the second distribution from the first, both given by their logs."""
    return (true.exp() * (true - other)).sum(-1)
