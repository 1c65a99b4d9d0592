"""Sanity checks of two attacks on the same images: the stronger must do at least as much."""

from itertools import permutations

from demur.attacks import PGD, Attack, Clean
from demur.metrics import BoolArray
from demur.sanity.attack_order import after, smaller_budget, wants_wrong, weaker, weaker_against
from demur.sanity.evidence import (
    SURE,
    CheckResult,
    Evidence,
    Flag,
    ParsedRecord,
    changed,
    has_name,
    listed,
    mcnemar_p_value,
    share,
    shared,
)

BEATEN = "a weaker attack beats a stronger one"


def weaker_beats_stronger(evidence: Evidence) -> CheckResult:
    """Whether an attack does less than one that is plainly weaker, image by image."""
    readable = [each for each in evidence.seen if each.attack is not None]
    compared, flags = False, list[Flag]()
    for one, other in permutations(readable, 2):
        if one.attack is None or other.attack is None:
            continue
        rejectors = _to_be_compared(one.attack, other, evidence)
        answers = wants_wrong(other.attack) and weaker(one.attack, other.attack)
        compared |= not isinstance(one.attack, Clean) and (answers or bool(rejectors))
        found = [_by_answers(one, other)] if answers else []
        found += [_by_slips(one, other, rejectors, evidence)] if rejectors else []
        flags += [flag for flag in found if flag]
    if compared or flags:
        return CheckResult(BEATEN, tuple(flags))
    named = [each for each in readable if isinstance(each.attack, PGD) and has_name(each.record)]
    wants = changed(named[0].record.label, "restarts", "10") if named else "pgd-100"
    return CheckResult(BEATEN, lacks="two attacks of which one is plainly weaker", wants=wants)


def _to_be_compared(one: Attack, other: ParsedRecord, evidence: Evidence) -> list[str]:
    """The rejectors past which the first attack should get no more than the second."""
    stronger = other.attack
    if stronger is None or isinstance(stronger, Clean):
        return []
    if after(stronger):
        return evidence.aimed_at(other) if weaker_against(one, stronger) else []
    alike = getattr(one, "keep", None) == getattr(stronger, "keep", None)  # a first hit is meek
    if wants_wrong(stronger) and alike and smaller_budget(one, stronger):
        return list(evidence.scoring.thresholds)
    return []


def _by_answers(one: ParsedRecord, other: ParsedRecord) -> Flag | None:
    ours, theirs = shared(one, other)
    first, second = ~one.right[ours], ~other.right[theirs]
    p = mcnemar_p_value(first, second)
    if p >= SURE:
        return None
    return Flag(
        BEATEN, (one.name, other.name),
        f"{one.name} leaves {share(~first)} of {len(first)} images right, but {other.name}, which "
        f"should be stronger, {share(~second)}: {_alone(first, second)} (p = {p:.1g}).",
        f"Count an image as broken if either breaks it, and mend {other.name}: a goal that does "
        "not saturate, shorter steps, more restarts.",
    )  # fmt: skip


def _by_slips(
    one: ParsedRecord, other: ParsedRecord, rejectors: list[str], evidence: Evidence
) -> Flag | None:
    """One flag for all rejectors past which the weaker attack gets more, the clearest first."""
    ours, theirs = shared(one, other)
    found = list[tuple[float, str, BoolArray, BoolArray]]()
    for name in rejectors:
        first, second = evidence.accepted_errors(name, one), evidence.accepted_errors(name, other)
        if first is not None and second is not None:
            p = mcnemar_p_value(first[ours], second[theirs])
            found.append((p, name, first[ours], second[theirs]))
    beaten = sorted((f for f in found if f[0] < SURE / len(found)), key=lambda f: f[0])
    if not beaten:
        return None
    p, name, first, second = beaten[0]
    others = [also for _, also, *_ in beaten[1:]]
    also = f"; the same with {listed(others)}" if others else ""
    return Flag(
        BEATEN, (one.name, other.name),
        f"{one.name} gets {int(first.sum())} of {len(first)} images past {name} with a wrong "
        f"answer, but {other.name}, which should be stronger, {int(second.sum())}: "
        f"{_alone(first, second)} (p = {p:.1g}){also}.",
        f"Do not call {other.name} the worst case for {name}: count an image as lost if either "
        "gets it past, then weigh its goal anew (eta), and give it more steps and restarts.",
    )  # fmt: skip


def _alone(first: BoolArray, second: BoolArray) -> str:
    only, lost = int((first & ~second).sum()), int((second & ~first).sum())
    return f"{only} by the weaker alone, {lost} by the stronger alone"
