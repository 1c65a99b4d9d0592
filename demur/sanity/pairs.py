"""Sanity check of pairs of attacks on the same images: the stronger must break at least as many."""

from itertools import permutations

from demur.attacks import PGD, Attack, Clean
from demur.metrics import BoolArray
from demur.sanity.attack_order import (
    smaller_budget,
    targeted_rules,
    weaker,
    weaker_against,
)
from demur.sanity.evidence import (
    SIGNIFICANCE,
    CheckResult,
    Evidence,
    Flag,
    ParsedRecord,
    common_images,
    is_named_attack,
    joined_names,
    mcnemar_p_value,
    share,
    with_change,
)

BEATEN = "a weaker attack beats a stronger one"


def weaker_beats_stronger(evidence: Evidence) -> CheckResult:
    """Check whether an attack breaks fewer images than one that must be weaker."""
    readable = [parsed for parsed in evidence.records if parsed.attack is not None]
    compared, flags = False, list[Flag]()
    for one, other in permutations(readable, 2):
        if one.attack is None or other.attack is None:
            continue
        rejectors = _comparable_rejectors(one.attack, other, evidence)
        by_error = other.attack.seeks_misclassification and weaker(one.attack, other.attack)
        compared |= not isinstance(one.attack, Clean) and (by_error or bool(rejectors))
        found = [_more_errors(one, other)] if by_error else []
        found += [_more_accepted_errors(one, other, rejectors, evidence)] if rejectors else []
        flags += [flag for flag in found if flag]
    if compared or flags:
        return CheckResult(BEATEN, tuple(flags))
    named = [
        parsed
        for parsed in readable
        if isinstance(parsed.attack, PGD) and is_named_attack(parsed.record)
    ]
    needed_attack = with_change(named[0].record.label, "restarts", "10") if named else "pgd-100"
    return CheckResult(
        BEATEN, missing="two attacks of which one must be weaker", needed_attack=needed_attack
    )


def _comparable_rejectors(one: Attack, other: ParsedRecord, evidence: Evidence) -> list[str]:
    """Rejectors for which `one` should cause no more accepted errors than `other`."""
    stronger = other.attack
    if stronger is None or isinstance(stronger, Clean):
        return []
    if targeted_rules(stronger):
        return evidence.targeted(other) if weaker_against(one, stronger) else []
    # keep="success" stops at the first error, which has a low confidence
    same_keep = getattr(one, "keep", None) == getattr(stronger, "keep", None)
    if stronger.seeks_misclassification and same_keep and smaller_budget(one, stronger):
        return list(evidence.evaluation.thresholds)
    return []


def _more_errors(one: ParsedRecord, other: ParsedRecord) -> Flag | None:
    """Flag if the weaker attack `one` causes significantly more errors than `other`."""
    ours, theirs = common_images(one, other)
    first, second = ~one.correct[ours], ~other.correct[theirs]
    p = mcnemar_p_value(first, second)
    if p >= SIGNIFICANCE:
        return None
    return Flag(
        BEATEN, (one.name, other.name),
        f"{one.name} leaves {share(~first)} of {len(first)} images correct, but {other.name}, "
        f"which should be stronger, {share(~second)}: {_only(first, second)} (p = {p:.1g}).",
        f"Count an image as broken if either attack breaks it, and improve {other.name}: an "
        "objective that does not saturate, smaller steps, more restarts.",
    )  # fmt: skip


def _more_accepted_errors(
    one: ParsedRecord, other: ParsedRecord, rejectors: list[str], evidence: Evidence
) -> Flag | None:
    """Flag if the weaker attack causes more accepted errors; the smallest p comes first."""
    ours, theirs = common_images(one, other)
    found = list[tuple[float, str, BoolArray, BoolArray]]()
    for name in rejectors:
        first, second = evidence.accepted_errors(name, one), evidence.accepted_errors(name, other)
        if first is not None and second is not None:
            p = mcnemar_p_value(first[ours], second[theirs])
            found.append((p, name, first[ours], second[theirs]))
    beaten = sorted((f for f in found if f[0] < SIGNIFICANCE / len(found)), key=lambda f: f[0])
    if not beaten:
        return None
    p, name, first, second = beaten[0]
    others = [also for _, also, *_ in beaten[1:]]
    also = f"; the same with {joined_names(others)}" if others else ""
    return Flag(
        BEATEN, (one.name, other.name),
        f"{one.name} causes accepted errors of {name} on {int(first.sum())} of {len(first)} "
        f"images, but {other.name}, which should be stronger, on {int(second.sum())}: "
        f"{_only(first, second)} (p = {p:.1g}){also}.",
        f"Do not call {other.name} the worst case for {name}: count an image as broken if either "
        "attack breaks it, then tune eta of its objective, and give it more steps and restarts.",
    )  # fmt: skip


def _only(first: BoolArray, second: BoolArray) -> str:
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return f"{only_first} by the weaker only, {only_second} by the stronger only"
