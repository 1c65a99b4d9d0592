"""Inputs of the theory from a record, and proportions of its images.

inputs = outputs_at(record, tau)        # con, tcon and A of every image
Proportion.of(inputs.xi <= 0.1)         # with its interval
"""

from dataclasses import dataclass

from demur.metrics import BoolArray, Interval, wilson
from demur.runs import Record
from demur.theory import TheoryInputs, theory_inputs_at


@dataclass(frozen=True)
class Proportion:
    """A proportion of n images with its 95% interval; 0 of 0 is 0."""

    value: float
    interval: Interval
    n: int

    @staticmethod
    def of(mask: BoolArray, among: BoolArray | None = None) -> "Proportion":
        """Proportion of true values among all images, or among those selected."""
        chosen = mask if among is None else mask[among]
        k, n = int(chosen.sum()), len(chosen)
        return Proportion(k / n if n else 0.0, wilson(k, n), n)


def outputs_at(record: Record, tau: float) -> TheoryInputs:
    """con, T-Con, A and correctness of each image at a temperature, in double precision."""
    a = record.output.aux[:, 0].double().sigmoid().numpy()
    return theory_inputs_at(record.output.logits.numpy(), record.y.numpy(), a, tau)
