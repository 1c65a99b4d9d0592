"""Goals that remember the probabilities before the attack.

GAMA()     # GAMA's (Sriramanan et al. 2020): a margin of probabilities, and a fading distance
KL()          # TRADES' (Zhang et al. 2019): away from the answer to the clean image

Relaxed's distance to the probabilities at the noisy start, whose weight falls to nothing over the
first steps, gives a gradient where the margin alone has none.
"""

from dataclasses import dataclass

from torch import Tensor

from demur.attacks.objectives.objective import AttackStart, Objective, ObjectiveState
from demur.attacks.objectives.untargeted import best_wrong
from demur.field_types import NonNegative, PositiveInt
from demur.output import Output, label_entry, log_probabilities


@dataclass(frozen=True)
class GAMA(Objective):
    """The best wrong probability minus the true one, plus a fading distance to the start's."""

    weight: NonNegative = 50.0
    fade: PositiveInt = 25  # steps until nothing is left of it

    @property
    def n_inputs(self) -> int:
        """The probabilities at the start, and the weight of the step."""
        return 2

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """The probabilities at the noisy start, and room for the weight."""
        start = log_probabilities(start_point.seen(start_point.x_start)).exp()
        return start, start.new_zeros(len(start))

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        """The probabilities at the start and how much their distance counts now."""
        start, room = objective_state
        return start, room + self.weight * max(0.0, 1 - step / self.fade)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """The margin plus the weighted distance."""
        start, weight = inputs
        now = log_probabilities(out).exp()
        return best_wrong(now, y) - label_entry(now, y) + weight * ((start - now) ** 2).sum(-1)


@dataclass(frozen=True)
class KL(Objective):
    """The divergence of the answer from that to the clean image, which is held still: TRADES'."""

    @property
    def n_inputs(self) -> int:
        """The log probabilities of the clean image."""
        return 1

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        """The log probabilities of the clean image."""
        return (log_probabilities(start_point.seen(start_point.x)),)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        """What is lost by taking the one for the other."""
        return divergence(inputs[0], log_probabilities(out))


def divergence(true: Tensor, other: Tensor) -> Tensor:
    """KL divergence of the second distribution from the first, both given by their logs."""
    return (true.exp() * (true - other)).sum(-1)
