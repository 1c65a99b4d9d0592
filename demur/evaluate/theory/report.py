"""The theory on every record of a run.

    report = theory(Run.open("digits-pgdat-rr"))
    report.violations                   # 0, or there is a bug
    report.records[0].at_tau            # the share inside Theorem 1 at each temperature

Everything is read off records, so a run without weights or data will do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from demur.errors import BadInput
from demur.evaluate.as_json import plain
from demur.evaluate.theory.ball import WorstCaseXi, worst_case_xi
from demur.evaluate.theory.record import XIS, RecordTheory, of_record
from demur.runs import Run
from demur.theory import TOYS, class_counts, n_sub, toy_values, xi_below

GAMMAS = (0.55, 0.6, 0.7, 0.8, 0.9)
RHO = 0.01  # the paper gives none; below 1/e it changes nothing


@dataclass(frozen=True)
class Difficulty:
    """The classes that learning a xi-error A is worth (Theorem 2)."""

    xi: float
    rho: float
    n1: float
    n2: float
    n_sub: int


@dataclass(frozen=True)
class ToyOrder:
    """A toy example at tau = 1 and tau = 2: the order turns round."""

    measure: str
    at_one: tuple[float, float]
    at_two: tuple[float, float]


@dataclass(frozen=True)
class TheoryReport:
    """The theory on every test record of a run."""

    run: str
    tau: float
    records: tuple[RecordTheory, ...]
    difficulty: tuple[Difficulty, ...]
    worst_case_xi: tuple[WorstCaseXi, ...]
    xi_attack_command: str | None  # how to make the record that is missing for it
    toys: tuple[ToyOrder, ...]

    @property
    def violations(self) -> int:
        """The cases in which a statement failed; each is a bug of ours."""
        return sum(check.violated for record in self.records for check in record.checks)

    def plain(self) -> dict[str, Any]:
        """The report as JSON values."""
        found: dict[str, Any] = plain(self)
        return found | {"violations": self.violations}


def theory(run: Run, gammas: Sequence[float] = GAMMAS, rho: float = RHO) -> TheoryReport:
    """All figures of a run whose head is R-Con's."""
    if not run.recipe.has_rectifier:
        raise BadInput(
            f"{run.name} has no A to hold against A*: the theory needs a net whose confidence is "
            "multiplied by one; train with head=RR()"
        )
    tau = run.recipe.tau
    difficulty = tuple(_difficulty(xi, rho) for xi in XIS)
    for gamma in gammas:
        xi_below(gamma)  # refuses a threshold that leaves no room
    records = run.records("test")
    if not records:
        name = run.path.name
        raise BadInput(f"{name} has no record yet; make some with demur attack {name} clean pgd-10")
    balls = worst_case_xi(records, gammas, tau)
    return TheoryReport(
        run=run.name,
        tau=tau,
        records=tuple(of_record(record, tau, gammas) for record in records),
        difficulty=difficulty,
        worst_case_xi=balls,
        xi_attack_command=None if balls else _how(run),
        toys=tuple(ToyOrder(toy.measure, toy_values(toy, 1), toy_values(toy, 2)) for toy in TOYS),
    )


def _difficulty(xi: float, rho: float) -> Difficulty:
    return Difficulty(xi, rho, *class_counts(xi, rho), n_sub(xi, rho))


def _how(run: Run) -> str:
    """The command that makes a record of an attack on xi, after a training where it takes one."""
    if run.finished:
        return f"demur attack {run.path} xi"
    again = f"runs/{run.name}"
    return (
        f"demur train @{run.path / 'recipe.txt'} --out {again}, since no weights are kept here, "
        f"and demur attack {again} clean xi"
    )
