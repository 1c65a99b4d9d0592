"""The largest xi that attacks found in a ball, per image.

    worst_case_xi(records, gammas, tau)    # share of images with xi below 2 - 1/gamma in the ball

While a prediction is correct, A* is constant at 1, so an attack on xi alone seldom finds a wrong
prediction with a large A. The maximum is therefore taken over all records in the ball.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from demur.attacks import XiObjective
from demur.balls import Ball, Linf
from demur.evaluate.theory.proportions import Proportion, outputs_at
from demur.metrics import FloatArray
from demur.recipes import VOCABULARY
from demur.runs import Record
from demur.spec import read, show
from demur.theory import is_confident, xi_below


@dataclass(frozen=True)
class XiBelow:
    """Share of images with xi below 2 - 1/gamma, before and after the attacks."""

    gamma: float
    xi: float
    clean: Proportion | None
    attacked: Proportion


@dataclass(frozen=True)
class WorstCaseXi:
    """Upper bounds of the share of images with a low xi in a whole ball (attacks may miss some)."""

    ball: str
    n: int
    records: tuple[str, ...]
    stays_low: tuple[XiBelow, ...]


def worst_case_xi(
    records: Sequence[Record], gammas: Sequence[float], tau: float
) -> tuple[WorstCaseXi, ...]:
    """One result for each ball in which a record's attack maximised xi, over all records in it."""
    balls_and_data = dict.fromkeys((_ball(record), record.metadata["data"]) for record in records)
    return tuple(
        _in_ball(ball, [r for r in records if r.metadata["data"] == images], gammas, tau)
        for ball, images in balls_and_data
        if ball is not None
    )


def _in_ball(ball: Ball, records: list[Record], gammas: Sequence[float], tau: float) -> WorstCaseXi:
    worst: FloatArray = np.zeros(len(records[0].y))
    clean: FloatArray | None = None
    labels = []
    for record in records:
        size = _sizes(ball, record)
        inside = size <= ball.eps * (1 + 1e-5) + 1e-6  # sizes are stored in fp32
        if not inside.any():
            continue
        xi = outputs_at(record, tau).xi
        worst = np.maximum(worst, np.where(inside, xi, 0.0))
        labels.append(record.label)
        if not size.any():
            clean = xi
    stays_low = tuple(
        XiBelow(
            gamma,
            xi_below(gamma),
            None if clean is None else Proportion.of(is_confident(gamma, clean)),
            Proportion.of(is_confident(gamma, worst)),
        )
        for gamma in gammas
    )
    return WorstCaseXi(show(ball), len(worst), tuple(labels), stays_low)


def _sizes(ball: Ball, record: Record) -> FloatArray:
    name = "size_linf" if isinstance(ball, Linf) else "size_l2"
    return record.arrays[name].double().numpy()


def _ball(record: Record) -> Ball | None:
    """Ball of a record whose attack maximised xi; None for any other attack."""
    text = str(record.metadata["spec"])
    if f"{XiObjective.__name__}(" not in text:
        return None
    ball = getattr(read(text, VOCABULARY), "ball", None)
    return ball if isinstance(ball, Ball) else None
