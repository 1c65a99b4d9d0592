"""Signs that an evaluation says less than it seems to, from records and scores alone.

    for check in checked(records, scoring):
        check.flags                       # what was seen, and the remedy
        check.lacks, check.wants          # or why it could not be looked for

A new check is a function of the evidence and a word in CHECKS; docs/sanity.md tells of each.
"""

from collections.abc import Callable, Sequence

from demur.evaluate.score import Scorer
from demur.runs import Record
from demur.sanity.evidence import CheckResult, Evidence, Flag
from demur.sanity.net import random_answers, tied_scores, zero_gradients
from demur.sanity.objective import goal_did_not_move
from demur.sanity.pairs import weaker_beats_stronger
from demur.sanity.radius import left_at_large_eps, rises_with_eps, too_good

CHECKS: tuple[Callable[[Evidence], CheckResult], ...] = (
    goal_did_not_move, zero_gradients, random_answers, weaker_beats_stronger, rises_with_eps,
    left_at_large_eps, too_good, tied_scores,
)  # fmt: skip

__all__ = ["CHECKS", "CheckResult", "Flag", "checked", "flags"]


def checked(records: Sequence[Record], scoring: Scorer) -> list[CheckResult]:
    """Every check on all records of one split."""
    evidence = Evidence(records, scoring)
    return [check(evidence) for check in CHECKS]


def flags(records: Sequence[Record], scoring: Scorer) -> list[Flag]:
    """What the checks found."""
    return [flag for check in checked(records, scoring) for flag in check.flags]
