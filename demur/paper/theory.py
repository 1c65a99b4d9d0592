"""The quantities of the theory on every record of a run.

    report = theory(Run.open("digits-pgdat-rr"))
    report.violations                   # 0; anything else is a bug in demur
    report.records[0].at_tau            # share inside Theorem 1 at each temperature

Everything is computed from records, so neither weights nor data are needed.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from demur.attacks import XiObjective
from demur.attacks.balls import Ball, Linf
from demur.errors import BadInput
from demur.evaluate.record_scores import JsonFields
from demur.metrics import BoolArray, FloatArray, Interval, wilson
from demur.paper import theorems as statements
from demur.paper.theorems import (
    Claim,
    TheoryInputs,
    class_counts,
    con_above,
    is_confident,
    n_sub,
    theory_inputs_at,
    xi_below,
)
from demur.recipes import VOCABULARY
from demur.runs import Record, Run
from demur.spec import read, show

GAMMAS = (0.55, 0.6, 0.7, 0.8, 0.9)
RHO = 0.01  # the paper gives no value; below 1/e the result does not depend on it
TAUS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # 0 is the limit
XIS = (0.1, 0.25, 0.5, 0.75, 0.9)
SMALL = 0.1  # the paper expects 70 to 90% of the images below this xi
THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
DRAWS = 10  # random labels per image


class Toy(NamedTuple):
    """Logits of two images whose order by p_0 depends on the temperature."""

    measure: str
    first: tuple[float, ...]
    second: tuple[float, ...]


TOYS = (
    Toy("T-Con of wrong predictions", (0, 3, -1000), (0, 2, 2)),
    Toy("confidence", (0, -1, -1000), (0, -2, -2)),
)


def toy_values(toy: Toy, tau: float) -> tuple[float, float]:
    """Probability of class 0 for both images of a toy example at a temperature."""
    first, second = statements.probabilities([toy.first, toy.second], tau)[:, 0].tolist()
    return first, second


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
    """One result for each ball in which a record's attack maximised xi, over all records in it.

    While a prediction is correct, A* is constant at 1, so an attack on xi alone seldom finds a
    wrong prediction with a large A. The maximum is therefore taken over all records in the ball.
    """
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
        xi = outputs_at(record, tau).xi  # raises for a scores-only record, which may lack sizes
        size = _sizes(ball, record)
        inside = size <= ball.eps * (1 + 1e-5) + 1e-6  # sizes are stored in fp32
        if not inside.any():
            continue
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


@dataclass(frozen=True)
class Difficulty:
    """Number of classes of the task that learning A with error xi is equivalent to (Theorem 2)."""

    xi: float
    rho: float
    n1: float
    n2: float
    n_sub: int


@dataclass(frozen=True)
class ToyOrder:
    """A toy example whose order of two inputs differs between tau = 1 and tau = 2."""

    measure: str
    at_one: tuple[float, float]
    at_two: tuple[float, float]


@dataclass(frozen=True)
class TheoryReport(JsonFields):
    """The quantities of the theory on every test record of a run that has the net's output."""

    run: str
    tau: float
    records: tuple[RecordTheory, ...]
    scores_only: tuple[str, ...]  # attacks that are left out: only scores are stored
    difficulty: tuple[Difficulty, ...]
    worst_case_xi: tuple[WorstCaseXi, ...]
    xi_attack_command: str | None  # command that makes the missing record; None if there is one
    toys: tuple[ToyOrder, ...]

    @property
    def violations(self) -> int:
        """Number of violated statements; each one is a bug in demur."""
        return sum(check.violated for record in self.records for check in record.checks)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return super().to_json() | {"violations": self.violations}


def theory(run: Run, gammas: Sequence[float] = GAMMAS, rho: float = RHO) -> TheoryReport:
    """Measure the theory on the test records of a run with an RR head.

    Raises BadInput if the run has no RR head, no records or none with the net's output, or if a
    gamma or rho is out of range.
    """
    if not run.recipe.has_rectifier:
        raise BadInput(
            f"{run.name} has no A to compare with A*: the theory needs a net whose R-Con is "
            "con * A; train with head=RR()"
        )
    tau = run.recipe.tau
    difficulty = tuple(_difficulty(xi, rho) for xi in XIS)
    for gamma in gammas:
        xi_below(gamma)  # raises BadInput if no xi satisfies the bound
    stored = run.records("test")
    if not stored:
        name = shlex.quote(str(run.path))
        raise BadInput(f"{name} has no record yet; make some with demur attack {name} clean pgd-10")
    # if no record has the output, the first one raises BadInput
    records = [record for record in stored if not record.scores_only] or list(stored)
    balls = worst_case_xi(records, gammas, tau)
    return TheoryReport(
        run=run.name,
        tau=tau,
        records=tuple(evaluate_record(record, tau, gammas) for record in records),
        scores_only=tuple(record.label for record in stored if record.scores_only),
        difficulty=difficulty,
        worst_case_xi=balls,
        xi_attack_command=None if balls else _xi_attack_command(run),
        toys=tuple(ToyOrder(toy.measure, toy_values(toy, 1), toy_values(toy, 2)) for toy in TOYS),
    )


def _difficulty(xi: float, rho: float) -> Difficulty:
    return Difficulty(xi, rho, *class_counts(xi, rho), n_sub(xi, rho))


def _xi_attack_command(run: Run) -> str:
    """Command that makes a record of the attack on xi, after a training if weights are missing."""
    if run.has_weights:
        return f"demur attack {shlex.quote(str(run.path))} xi"
    new_run = f"runs/{run.name}-again"
    train = shlex.join(["demur", "train", f"@{run.path / 'recipe.txt'}", "--out", new_run])
    attack = shlex.join(["demur", "attack", new_run, "clean", "xi"])
    return f"{train}, since there are no weights here, and {attack}"
