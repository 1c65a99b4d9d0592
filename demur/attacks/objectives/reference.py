"""Objectives that compare the output with an earlier one.

GAMA()     # Sriramanan et al. 2020: probability margin plus a decaying squared distance
KL()       # TRADES (Zhang et al. 2019): KL divergence from the clean prediction
"""

from dataclasses import dataclass

from torch import Tensor

from demur.attacks.objectives.objective import AttackStart, Objective, ObjectiveState
from demur.attacks.objectives.untargeted import best_wrong
from demur.field_types import NonNegative, PositiveInt
from demur.output import Output, label_entry, log_probabilities


@dataclass(frozen=True)
class GAMA(Objective):
    """GAMA: max wrong probability - true probability + w_t * ||p(x_start) - p(x_adv)||^2.

    The distance gives a gradient where the margin alone has none.

    Args:
        weight: w_0, the weight of the distance at the first step.
        fade: The number of steps over which w_t falls linearly to 0.
    """

    weight: NonNegative = 50.0
    fade: PositiveInt = 25

    @property
    def n_inputs(self) -> int:
        return 2

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        start = log_probabilities(start_point.output(start_point.x_start)).exp()
        return start, start.new_zeros(len(start))  # the zeros become w_t in at_step

    def at_step(self, objective_state: ObjectiveState, step: int, steps: int) -> ObjectiveState:
        start, zeros = objective_state
        return start, zeros + self.weight * max(0.0, 1 - step / self.fade)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        start, weight = inputs
        now = log_probabilities(out).exp()
        return best_wrong(now, y) - label_entry(now, y) + weight * ((start - now) ** 2).sum(-1)


@dataclass(frozen=True)
class KL(Objective):
    """TRADES' objective: KL(p(x) || p(x_adv)), with the clean prediction p(x) fixed."""

    @property
    def n_inputs(self) -> int:
        return 1

    def prepare(self, start_point: AttackStart) -> ObjectiveState:
        return (log_probabilities(start_point.output(start_point.x)),)

    def __call__(self, out: Output, y: Tensor, *inputs: Tensor) -> Tensor:
        return divergence(inputs[0], log_probabilities(out))


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) per row, from log probabilities of shape N, K."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
