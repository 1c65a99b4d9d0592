"""The verdict on an evaluation: one of three grades with a fixed meaning, and its reasons.

docs/guides/audit.md has the definitions, word by word.
"""

from collections.abc import Sequence
from typing import Any

from demur.metrics import wilson
from demur.sanity.evidence import CheckResult, too_many
from demur.sanity.grades import MIN_IMAGES, MIN_LEFT, Grade, Verdict

KINDS_OF_ATTACK = {  # beginnings of the names of members, and what is not tried without them
    ("fab", "closest"): "FAB",
    ("square",): "Square",
    ("rays", "hopskipjump"): "attacks by decisions",
    ("transfer", "surrogate"): "attacks by transfer",
}


def verdict_of(
    results: Sequence[Any],
    checks: Sequence[CheckResult],
    warnings: Sequence[str],
    claim: float | None = None,
) -> Verdict:
    """Return the verdict on EnsembleResults, the last of which is the one a claim is about."""
    flags, n = [flag for check in checks for flag in check.flags], len(results[-1].broken_by)
    if n < MIN_IMAGES:
        few = f"{n} images are too few to show a sign; attack at least {MIN_IMAGES}"
        warnings = [*warnings, few]
    if found := _refuted(results, claim):
        besides = [*dict.fromkeys(flag.kind for flag in flags), *warnings]
        more = [f"Besides: {', '.join(besides)}."] if besides else []
        return Verdict(Grade.BROKEN, (*found, *more))
    if flags or warnings:
        signs = [f"{flag.kind}: {flag.observed} Remedy: {flag.remedy}" for flag in flags]
        signs += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in warnings]
        return Verdict(Grade.SUSPICIOUS, tuple(signs))
    skipped = [check.kind for check in checks if check.missing]
    count = len(checks) - len(skipped)
    made = f"{count} checks found nothing" if count else "No check was made"
    reasons = [f"{made} on {n} images.", f"Not tried: {', '.join(not_tried(results))}."]
    reasons += [f"Not checked: {', '.join(skipped)}."] if skipped else []
    return Verdict(Grade.NO_SIGN, tuple(reasons))


def _refuted(results: Sequence[Any], claim: float | None) -> list[str]:
    """Return a sentence for each way in which what was found refutes the robustness."""
    last, sentences = results[-1], []
    n, left = len(last.broken_by), last.left
    low, high = wilson(left, n)
    if claim is not None and high < claim:
        sentences.append(
            f"The claim is {claim:.1%}, and the attacks leave {left:g} of {n} images, "
            f"{left / n:.1%} [{100 * low:.1f}, {100 * high:.1f}]."
        )
    for result in results:
        count, of = result.masked
        if of and too_many(count, of):
            sentences.append(
                f"Attacks without gradients broke {count} of {of} images that every gradient "
                "attack left, so a figure by gradients is false."
            )
    right = n - last.broken_by.count("clean")
    if last.seeks_errors and right and left <= MIN_LEFT * right:
        what = "without an accepted error" if last.rejects else "right"
        sentences.append(f"Of {right} images that are {what} without an attack, {left:g} are left.")
    return sentences


def not_tried(results: Sequence[Any]) -> list[str]:
    """Return what no attack of the evaluation did."""
    names = [name for result in results for name in result.seconds]
    kinds = KINDS_OF_ATTACK.items()
    missing = [kind for begins, kind in kinds if not any(n.startswith(begins) for n in names)]
    return [*missing, "other norms and radii", "an attack written for this model"]
