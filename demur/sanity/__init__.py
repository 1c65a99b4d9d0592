"""Sanity checks: signs that an evaluation overestimates robustness, from records and scores.

A new check is a function of the Evidence and an entry in CHECKS; docs/sanity.md describes each.
"""

from collections.abc import Callable, Sequence

from demur.evaluate.score import RejectorEvaluation
from demur.runs import Record
from demur.sanity.comparisons import (
    left_at_large_eps,
    rises_with_eps,
    too_good,
    weaker_beats_stronger,
)
from demur.sanity.evidence import CheckResult, Evidence, Flag, parse_records
from demur.sanity.single_records import (
    objective_did_not_rise,
    random_outputs,
    tied_scores,
    zero_gradients,
)

CHECKS: tuple[Callable[[Evidence], CheckResult], ...] = (
    objective_did_not_rise, zero_gradients, random_outputs, weaker_beats_stronger, rises_with_eps,
    left_at_large_eps, too_good, tied_scores,
)  # fmt: skip

__all__ = ["CHECKS", "CheckResult", "Flag", "checks_of", "run_checks"]


def run_checks(records: Sequence[Record], evaluation: RejectorEvaluation) -> list[CheckResult]:
    """Run every check on the records of one split."""
    return checks_of(Evidence(parse_records(records), evaluation))


def checks_of(evidence: Evidence) -> list[CheckResult]:
    """Run every check on the evidence."""
    return [check(evidence) for check in CHECKS]
