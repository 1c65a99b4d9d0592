"""The quantities of the theory on one record.

    found = evaluate_record(record, tau=1.0, gammas=(0.6, 0.8))
    found.at_tau[0].inside              # share that meets the premise of Theorem 1 as tau goes to 0

Proportions have intervals; each statement is checked on every image in every setting.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from demur import theory as statements
from demur.evaluate.theory.proportions import Proportion, outputs_at
from demur.runs import Record
from demur.theory import Claim, TheoryInputs, con_above, xi_below

TAUS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # 0 is the limit
XIS = (0.1, 0.25, 0.5, 0.75, 0.9)
SMALL = 0.1  # the paper expects 70 to 90% of the images below this xi
THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
DRAWS = 10  # random labels per image


@dataclass(frozen=True)
class Check:
    """How often a statement applied and was violated, over all images and settings."""

    statement: str
    applied: int
    violated: int


@dataclass(frozen=True)
class XiError:
    """Difference between A and A*, and the accuracy of A as a classifier into bins (Theorem 2)."""

    median_geometric: float
    median_arithmetic: float
    smallest_a: float
    below_one: Proportion  # as Definition 1 requires
    better_than_guess: Proportion  # a smaller xi than A = 1/2 gives
    small: Proportion  # xi <= 0.1
    small_of_right: Proportion
    small_of_wrong: Proportion
    same_bin: Proportion  # accuracy in the task of Theorem 2 for xi = 0.1


@dataclass(frozen=True)
class AtTau:
    """One temperature: share inside Theorem 1 at each image's xi; accuracy of sampled labels."""

    tau: float
    inside: Proportion
    of_right: Proportion
    of_wrong: Proportion
    without_head: Proportion  # inside if A were 1 for every image
    randomised: float
    sampled: float
    sampling_error: float


@dataclass(frozen=True)
class AtXi:
    """One xi: shares with a high enough confidence, with an accurate enough A, and with both."""

    xi: float
    con_above: float
    confident: Proportion
    accurate: Proportion
    inside: Proportion


@dataclass(frozen=True)
class AtGamma:
    """Acceptance by confidence >= gamma and R-Con > 1/2."""

    gamma: float
    xi_below: float
    past: Proportion
    inside: Proportion
    inside_of_past: Proportion
    accepted: Proportion  # confidence >= gamma and R-Con > 1/2
    right_of_accepted: Proportion


@dataclass(frozen=True)
class AtThreshold:
    """Acceptance by confidence >= t: accuracy if it were calibrated, and measured accuracy."""

    t: float
    coverage: Proportion
    calibrated: float
    measured: Proportion


@dataclass(frozen=True)
class AtOracle:
    """Acceptance by T-Con > 1/2, an oracle since T-Con needs the labels."""

    coverage: Proportion
    accuracy: Proportion
    right_kept: Proportion


@dataclass(frozen=True)
class RecordTheory:
    """The quantities of the theory on one record."""

    attack: str
    record: str
    n: int
    accuracy: Proportion
    checks: tuple[Check, ...]
    xi: XiError
    at_tau: tuple[AtTau, ...]
    at_xi: tuple[AtXi, ...]
    at_gamma: tuple[AtGamma, ...]
    calibration: tuple[AtThreshold, ...]
    oracle: AtOracle


def evaluate_record(record: Record, tau: float, gammas: Sequence[float]) -> RecordTheory:
    """Quantities of a record at the temperature of its head, and at those of TAUS."""
    inputs = outputs_at(record, tau)
    at_all = [inputs, *(outputs_at(record, other) for other in TAUS if other != tau)]
    return RecordTheory(
        attack=record.label,
        record=record.digest,
        n=len(inputs.correct),
        accuracy=Proportion.of(inputs.correct),
        checks=_checks(at_all, gammas),
        xi=_xi_error(inputs),
        at_tau=tuple(_at_tau(record, other) for other in sorted({*TAUS, tau})),
        at_xi=tuple(_at_xi(inputs, xi) for xi in XIS),
        at_gamma=tuple(_at_gamma(inputs, gamma) for gamma in gammas),
        calibration=tuple(_at_threshold(inputs, t) for t in THRESHOLDS),
        oracle=_at_oracle(inputs),
    )


def _checks(at_all: list[TheoryInputs], gammas: Sequence[float]) -> tuple[Check, ...]:
    """Check each statement at every temperature; Theorem 1 at each image's xi, XIS and gammas."""
    theorem1 = [
        claim
        for inputs in at_all
        for claim in (
            statements.theorem1(inputs),
            *(statements.theorem1(inputs, xi) for xi in XIS),
            *(statements.theorem1_above(inputs, gamma) for gamma in gammas),
        )
    ]
    return (
        _check("Lemma 1", map(statements.lemma1, at_all)),
        _check("Theorem 1", theorem1),
        _check("T-Con > 1/2 is right", map(statements.oracle, at_all)),
    )


def _check(statement: str, claims: Iterable[Claim]) -> Check:
    counts = [(int(claim.premise.sum()), int(claim.violated.sum())) for claim in claims]
    applied, violated = (sum(column) for column in zip(*counts, strict=True))
    return Check(statement, applied, violated)


def _xi_error(inputs: TheoryInputs) -> XiError:
    xi, best = inputs.xi, inputs.a_star
    guess = statements.pointwise_xi(np.full_like(best, 0.5), best)
    same = statements.arithmetic_bin(inputs.a, SMALL) == statements.arithmetic_bin(best, SMALL)
    return XiError(
        median_geometric=float(np.median(statements.xi_geometric(inputs.a, best))),
        median_arithmetic=float(np.median(statements.xi_arithmetic(inputs.a, best))),
        smallest_a=float(inputs.a.min()),
        below_one=Proportion.of(xi < 1),
        better_than_guess=Proportion.of(xi < guess),
        small=Proportion.of(xi <= SMALL),
        small_of_right=Proportion.of(xi <= SMALL, inputs.correct),
        small_of_wrong=Proportion.of(xi <= SMALL, ~inputs.correct),
        same_bin=Proportion.of(same),
    )


def _at_tau(record: Record, tau: float) -> AtTau:
    inputs, y = outputs_at(record, tau), record.y.numpy()
    inside = statements.theorem1(inputs).premise
    p = statements.probabilities(record.output.logits.numpy(), tau)
    with_a_one = replace(inputs, a=np.ones_like(inputs.a))
    return AtTau(
        tau=tau,
        inside=Proportion.of(inside),
        of_right=Proportion.of(inside, inputs.correct),
        of_wrong=Proportion.of(inside, ~inputs.correct),
        without_head=Proportion.of(statements.theorem1(with_a_one).premise),
        randomised=statements.randomised_accuracy(inputs.tcon),
        sampled=statements.sampled_accuracy(p, y, DRAWS, seed=int(record.digest[:8], 16)),
        sampling_error=statements.sampling_error(inputs.tcon, DRAWS),
    )


def _at_xi(inputs: TheoryInputs, xi: float) -> AtXi:
    return AtXi(
        xi,
        con_above(xi),
        Proportion.of(statements.is_confident(inputs.con, xi)),
        Proportion.of(statements.is_xi_accurate(inputs, xi)),
        Proportion.of(statements.theorem1(inputs, xi).premise),
    )


def _at_gamma(inputs: TheoryInputs, gamma: float) -> AtGamma:
    confident, inside = inputs.con >= gamma, statements.theorem1_above(inputs, gamma).premise
    accepted = confident & (inputs.rcon > 0.5)
    return AtGamma(
        gamma, xi_below(gamma), Proportion.of(confident), Proportion.of(inside),
        Proportion.of(inside, confident), Proportion.of(accepted),
        Proportion.of(inputs.correct, accepted),
    )  # fmt: skip


def _at_threshold(inputs: TheoryInputs, t: float) -> AtThreshold:
    accepted = inputs.con >= t
    calibrated = statements.calibrated_accuracy(inputs.con, t)
    return AtThreshold(
        t, Proportion.of(accepted), calibrated, Proportion.of(inputs.correct, accepted)
    )


def _at_oracle(inputs: TheoryInputs) -> AtOracle:
    accepted, correct = inputs.tcon > 0.5, inputs.correct
    return AtOracle(
        Proportion.of(accepted), Proportion.of(correct, accepted), Proportion.of(accepted, correct)
    )
