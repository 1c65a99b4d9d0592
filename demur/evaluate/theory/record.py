"""Every figure that the theory gives of one record.

    found = of_record(record, tau=1.0, gammas=(0.6, 0.8))
    found.at_tau[0].inside              # the share inside Theorem 1 as tau goes to 0

Shares carry their intervals; statements are tried on every image in every setting.
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
SMALL = 0.1  # the xi for which the paper expects 70 to 90% of the images
THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
DRAWS = 10  # labels drawn for every image


@dataclass(frozen=True)
class Check:
    """A statement tried on every image in every setting: how often it applied, and failed."""

    statement: str
    applied: int
    violated: int


@dataclass(frozen=True)
class XiError:
    """How far A is from A*, and the task of learning it as one of many classes."""

    median_geometric: float
    median_arithmetic: float
    smallest_a: float
    below_one: Proportion  # Definition 1 can be met
    better_than_guess: Proportion  # than A = 1/2
    small: Proportion  # xi <= 0.1
    small_of_right: Proportion
    small_of_wrong: Proportion
    same_bin: Proportion  # the accuracy in Theorem 2's task for xi = 0.1


@dataclass(frozen=True)
class AtTau:
    """One temperature: who is inside Theorem 1 at their own xi, and labels drawn at random."""

    tau: float
    inside: Proportion
    of_right: Proportion
    of_wrong: Proportion
    without_head: Proportion  # inside, if A were 1 everywhere
    randomised: float
    sampled: float
    sampling_error: float


@dataclass(frozen=True)
class AtXi:
    """One xi: who is confident enough, whose A is accurate enough, and who is both."""

    xi: float
    con_above: float
    confident: Proportion
    accurate: Proportion
    inside: Proportion


@dataclass(frozen=True)
class AtGamma:
    """One confidence threshold with R-Con > 1/2 behind it."""

    gamma: float
    xi_below: float
    past: Proportion
    inside: Proportion
    inside_of_past: Proportion
    accepted: Proportion  # past the threshold with R-Con above 1/2
    right_of_accepted: Proportion


@dataclass(frozen=True)
class AtThreshold:
    """Confidence alone at one threshold: the accuracy if it were calibrated, and the measured."""

    t: float
    coverage: Proportion
    calibrated: float
    measured: Proportion


@dataclass(frozen=True)
class AtOracle:
    """T-Con above 1/2 as the rejector that nobody has."""

    coverage: Proportion
    accuracy: Proportion
    right_kept: Proportion


@dataclass(frozen=True)
class RecordTheory:
    """Every figure of one record."""

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


def of_record(record: Record, tau: float, gammas: Sequence[float]) -> RecordTheory:
    """The record at the temperature of its head, and at others."""
    seen = outputs_at(record, tau)
    at_all = [seen, *(outputs_at(record, other) for other in TAUS if other != tau)]
    return RecordTheory(
        attack=record.label,
        record=record.digest,
        n=len(seen.correct),
        accuracy=Proportion.of(seen.correct),
        checks=_checks(at_all, gammas),
        xi=_xi_error(seen),
        at_tau=tuple(_at_tau(record, other) for other in sorted({*TAUS, tau})),
        at_xi=tuple(_at_xi(seen, xi) for xi in XIS),
        at_gamma=tuple(_at_gamma(seen, gamma) for gamma in gammas),
        calibration=tuple(_at_threshold(seen, t) for t in THRESHOLDS),
        oracle=_at_oracle(seen),
    )


def _checks(at_all: list[TheoryInputs], gammas: Sequence[float]) -> tuple[Check, ...]:
    """Each statement at every temperature; Theorem 1 at each image's own xi, all xi and gamma."""
    theorem1 = [
        claim
        for seen in at_all
        for claim in (
            statements.theorem1(seen),
            *(statements.theorem1(seen, xi) for xi in XIS),
            *(statements.theorem1_behind(seen, gamma) for gamma in gammas),
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


def _xi_error(seen: TheoryInputs) -> XiError:
    xi, best = seen.xi, seen.a_star
    guess = statements.point_xi(np.full_like(best, 0.5), best)
    same = statements.arithmetic_bin(seen.a, SMALL) == statements.arithmetic_bin(best, SMALL)
    return XiError(
        median_geometric=float(np.median(statements.xi_geometric(seen.a, best))),
        median_arithmetic=float(np.median(statements.xi_arithmetic(seen.a, best))),
        smallest_a=float(seen.a.min()),
        below_one=Proportion.of(xi < 1),
        better_than_guess=Proportion.of(xi < guess),
        small=Proportion.of(xi <= SMALL),
        small_of_right=Proportion.of(xi <= SMALL, seen.correct),
        small_of_wrong=Proportion.of(xi <= SMALL, ~seen.correct),
        same_bin=Proportion.of(same),
    )


def _at_tau(record: Record, tau: float) -> AtTau:
    seen, y = outputs_at(record, tau), record.y.numpy()
    inside = statements.theorem1(seen).premise
    p = statements.probabilities(record.output.logits.numpy(), tau)
    trusting = replace(seen, a=np.ones_like(seen.a))
    return AtTau(
        tau=tau,
        inside=Proportion.of(inside),
        of_right=Proportion.of(inside, seen.correct),
        of_wrong=Proportion.of(inside, ~seen.correct),
        without_head=Proportion.of(statements.theorem1(trusting).premise),
        randomised=statements.randomised_accuracy(seen.tcon),
        sampled=statements.sampled_accuracy(p, y, DRAWS, seed=int(record.digest[:8], 16)),
        sampling_error=statements.sampling_error(seen.tcon, DRAWS),
    )


def _at_xi(seen: TheoryInputs, xi: float) -> AtXi:
    return AtXi(
        xi,
        con_above(xi),
        Proportion.of(statements.confident(seen.con, xi)),
        Proportion.of(statements.accurate(seen, xi)),
        Proportion.of(statements.theorem1(seen, xi).premise),
    )


def _at_gamma(seen: TheoryInputs, gamma: float) -> AtGamma:
    past, inside = seen.con >= gamma, statements.theorem1_behind(seen, gamma).premise
    accepted = past & (seen.rcon > 0.5)
    return AtGamma(
        gamma, xi_below(gamma), Proportion.of(past), Proportion.of(inside), Proportion.of(inside, past),
        Proportion.of(accepted), Proportion.of(seen.correct, accepted),
    )  # fmt: skip


def _at_threshold(seen: TheoryInputs, t: float) -> AtThreshold:
    kept = seen.con >= t
    calibrated = statements.calibrated_accuracy(seen.con, t)
    return AtThreshold(t, Proportion.of(kept), calibrated, Proportion.of(seen.correct, kept))


def _at_oracle(seen: TheoryInputs) -> AtOracle:
    kept = seen.tcon > 0.5
    return AtOracle(
        Proportion.of(kept), Proportion.of(seen.correct, kept), Proportion.of(kept, seen.correct)
    )
