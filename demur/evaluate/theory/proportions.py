"""A record as the theory sees it, and shares of its images.

seen = seen_at(record, tau)             # con, tcon and A of every image
Share.of(seen.xi <= 0.1)                # with its interval
"""

from dataclasses import dataclass

from demur.metrics import BoolArray, Interval, wilson
from demur.runs import Record
from demur.theory import TheoryInputs, theory_inputs_at


@dataclass(frozen=True)
class Proportion:
    """A share of images with its 95% interval; 0 of 0 is 0."""

    value: float
    interval: Interval
    n: int

    @staticmethod
    def of(mask: BoolArray, among: BoolArray | None = None) -> "Proportion":
        """The share of true values, among all images or some."""
        chosen = mask if among is None else mask[among]
        k, n = int(chosen.sum()), len(chosen)
        return Proportion(k / n if n else 0.0, wilson(k, n), n)


def outputs_at(record: Record, tau: float) -> TheoryInputs:
    """The record's answers at a temperature, in doubles."""
    a = record.output.aux[:, 0].double().sigmoid().numpy()
    return theory_inputs_at(record.output.logits.numpy(), record.y.numpy(), a, tau)
