"""The quantities of the theory on every record of a run.

    report = theory(Run.open("digits-pgdat-rr"))
    report.violations                   # 0; anything else is a bug in demur
    report.records[0].at_tau            # share inside Theorem 1 at each temperature

Everything is computed from records, so neither weights nor data are needed.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from demur.errors import BadInput
from demur.evaluate.as_json import to_json
from demur.evaluate.theory.ball import WorstCaseXi, worst_case_xi
from demur.evaluate.theory.record import XIS, RecordTheory, evaluate_record
from demur.runs import Run
from demur.theory import TOYS, class_counts, n_sub, toy_values, xi_below

GAMMAS = (0.55, 0.6, 0.7, 0.8, 0.9)
RHO = 0.01  # the paper gives no value; below 1/e the result does not depend on it


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
class TheoryReport:
    """The quantities of the theory on every test record of a run."""

    run: str
    tau: float
    records: tuple[RecordTheory, ...]
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
        values: dict[str, Any] = to_json(self)
        return values | {"violations": self.violations}


def theory(run: Run, gammas: Sequence[float] = GAMMAS, rho: float = RHO) -> TheoryReport:
    """Measure the theory on the test records of a run with an RR head.

    Raises BadInput if the run has no RR head or no records, or if a gamma or rho is out of range.
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
    records = run.records("test")
    if not records:
        name = shlex.quote(str(run.path))
        raise BadInput(f"{name} has no record yet; make some with demur attack {name} clean pgd-10")
    balls = worst_case_xi(records, gammas, tau)
    return TheoryReport(
        run=run.name,
        tau=tau,
        records=tuple(evaluate_record(record, tau, gammas) for record in records),
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
        return f"demur attack {run.path} xi"
    new_run = f"runs/{run.name}"
    return (
        f"demur train @{run.path / 'recipe.txt'} --out {new_run}, since there are no weights here, "
        f"and demur attack {new_run} clean xi"
    )
