"""Checks that compare attacks, for runs and audits: over eps, and a stronger with a weaker one."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from demur.attacks import CE, EOTPGD, PGD, Attack, Clean, Misclassified
from demur.attacks.balls import Ball, Linf
from demur.metrics import BoolArray
from demur.recipes import NAMED_ATTACKS
from demur.runs import Record
from demur.sanity.evidence import (
    SIGNIFICANCE,
    TOLERATED,
    CheckResult,
    Evidence,
    Flag,
    ParsedRecord,
    ball_of,
    common_images,
    joined_names,
    mean_count,
    p_above,
    rebuilt,
    share,
    targeted_rules,
)
from demur.spec import show

RISES = "accuracy rises with eps"
LEFT = "accuracy is left at a large eps"
TOO_GOOD = "a rejector seems too good"
FIXED = {"eps": 1.0, "step_size": None, "seed": 0}  # equal in all attacks of a sweep over eps
GREY = 0.5  # at this Linf radius every image can be made grey
LARGE = 128 / 255  # the last radius of the paper's sweep
BEATEN = "a weaker attack beats a stronger one"


def rises_with_eps(evidence: Evidence) -> CheckResult:
    """Check whether the same attack leaves a higher accuracy at a larger radius."""
    sweeps = [sweep for sweep in _sweeps(evidence) if len(sweep) > 1]
    if not sweeps:
        needed = _with_eps(evidence, Linf, LARGE)
        return CheckResult(RISES, (), "the same attack at two radii", needed)
    flags = list[Flag]()
    for (small, one), (large, other) in (pair for sweep in sweeps for pair in pairwise(sweep)):
        ours, theirs = common_images(one, other)
        before, after = one.correct[:, ours], other.correct[:, theirs]
        if (p := paired_p_value(after, before)) < SIGNIFICANCE:
            flags.append(Flag(
                RISES, (one.name, other.name),
                f"The same attack leaves {share(before)} of {len(ours)} images correct at "
                f"eps={show(small)} and {share(after)} at eps={show(large)} (p = {p:.1g}).",
                "The larger ball contains the smaller one, so the attack fails: give it more "
                "steps, such that steps times step size reach eps, and more restarts.",
            ))  # fmt: skip
    return CheckResult(RISES, tuple(flags))


def left_at_large_eps(evidence: Evidence) -> CheckResult:
    """Check whether images are correct at a radius where every image can be made grey."""
    large = [parsed for sweep in _sweeps(evidence) for eps, parsed in sweep
             if eps >= GREY and isinstance(parsed.ball, Linf)]  # fmt: skip
    if not large:
        needed = _with_eps(evidence, Linf, LARGE)
        return CheckResult(LEFT, (), "an attack at eps of 1/2 or more", needed)
    flags = tuple(
        Flag(
            LEFT, (parsed.name,),
            f"{share(parsed.correct)} of {len(parsed.index)} images are still correct under "
            f"{parsed.name}, though every image can be made grey there; {TOLERATED:.0%} are "
            "tolerated.",
            "Gradients are masked or the steps are too short: check the gradients, let steps times "
            "step size reach eps, and attack without gradients (Square).",
        )
        for parsed in large
        if p_above(parsed.correct, TOLERATED) < SIGNIFICANCE
    )  # fmt: skip
    return CheckResult(LEFT, flags)


def too_good(evidence: Evidence) -> CheckResult:
    """Check whether a rejector is more robust at eps than its classifier at eps/2 (Tramer 2022)."""
    if not evidence.evaluation.thresholds:
        return CheckResult(TOO_GOOD, missing="a threshold; train with split=held-out")
    if evidence.clean is None:
        return CheckResult(TOO_GOOD, missing="a record of the clean images", needed_attack="clean")
    groups = defaultdict[tuple[type[Ball], float], list[ParsedRecord]](list)
    for parsed in evidence.attacked:
        if (ball := parsed.ball) is not None:
            groups[type(ball), ball.eps].append(parsed)
    flags, compared = list[Flag](), False
    for (norm, eps), at_eps in groups.items():
        at_half = [parsed for (other, half), group in groups.items() for parsed in group
                   if other is norm and math.isclose(half, eps / 2)]  # fmt: skip
        compared |= bool(at_half)
        flags += _too_good_flag(eps, at_eps, at_half, evidence.clean, evidence) if at_half else []
    if compared:
        return CheckResult(TOO_GOOD, tuple(flags))
    norm, eps = min(groups, key=lambda at: (at[0] is not Linf, at[1]), default=(Linf, 2 * LARGE))
    needed = _with_eps(evidence, norm, eps / 2)
    return CheckResult(TOO_GOOD, (), "an attack at half the radius of another", needed)


def _too_good_flag(
    eps: float, at_eps: list[ParsedRecord], at_half: list[ParsedRecord], clean: ParsedRecord,
    evidence: Evidence,
) -> list[Flag]:  # fmt: skip
    """At most one flag: the rejector with the smallest p, with the names of the others."""
    size = 1 + max(int(parsed.index.max()) for parsed in (clean, *at_eps, *at_half))
    in_half, robust_at_half = _all_of([(parsed, parsed.correct) for parsed in at_half], size)
    found = list[tuple[str, BoolArray, BoolArray]]()
    for name in evidence.evaluation.thresholds:
        accepted = evidence.accepted(name, clean)
        every = ((parsed, evidence.accepted_errors(name, parsed)) for parsed in at_eps)
        errors = [(parsed, found) for parsed, found in every if found is not None]
        if accepted is None or not errors:
            continue
        in_clean, accepted_correct = _all_of([(clean, clean.correct & accepted)], size)
        in_eps, no_error = _all_of([(parsed, ~errors_of) for parsed, errors_of in errors], size)
        images = in_clean & in_eps & in_half
        if images.any():
            safe = (accepted_correct & no_error)[:, images]
            found.append((name, safe, robust_at_half[:, images]))
    if (most := most_significant(found)) is None:
        return []
    p, name, safe, robust, also = most
    return [Flag(
        TOO_GOOD, tuple(parsed.name for parsed in (*at_eps, *at_half)),
        f"With {name} {share(safe)} of {safe.shape[1]} images seem safe at eps={show(eps)}: "
        "correct and accepted without an attack, and never an accepted error under attack. Such a "
        "detector would imply an equally robust classifier at half the radius, but there this one "
        f"gets {share(robust)} correct (p = {p:.1g}){also}.",
        f"Attack {name} itself with a stronger attack first: objective=PlusLogScore and "
        "criterion=AcceptedError with more steps and restarts (start with the attack adaptive).",
    )]  # fmt: skip


def _all_of(
    claims: Sequence[tuple[ParsedRecord, BoolArray]], size: int
) -> tuple[BoolArray, BoolArray]:
    """For every index of the data set: is it in a record, and do all claims hold, in each pass?"""
    present, holds = np.zeros(size, np.bool_), np.ones((len(claims[0][1]), size), np.bool_)
    for parsed, claim in claims:
        present[parsed.index] = True
        holds[:, parsed.index] &= claim
    return present, holds


def _sweeps(evidence: Evidence) -> list[list[tuple[float, ParsedRecord]]]:
    """Groups of records whose attacks differ in the radius only, each by increasing radius."""
    found = defaultdict[str, dict[float, ParsedRecord]](dict)
    for parsed in evidence.attacked:
        attack, ball = parsed.attack, parsed.ball
        if attack is None or ball is None or not attack.seeks_misclassification:
            continue
        same = rebuilt(attack, lambda _, values: {k: FIXED.get(k, v) for k, v in values.items()})
        sweep = found[show(same)]
        if ball.eps not in sweep or len(sweep[ball.eps].index) < len(parsed.index):
            sweep[ball.eps] = parsed
    return [sorted(sweep.items(), key=lambda at: at[0]) for sweep in found.values()]


def _with_eps(evidence: Evidence, norm: type[Ball], eps: float) -> str:
    """Label of the longest PGD on the cross-entropy, at another radius, as the command takes it."""
    plain = [
        (parsed.attack.steps, -parsed.attack.restarts, parsed.record.label)
        for parsed in evidence.attacked
        if isinstance(parsed.attack, PGD)
        and is_plain(parsed.attack)
        and isinstance(parsed.attack.ball, norm)
        and is_named_attack(parsed.record)
        and parsed.attack.steps * (parsed.attack.step_size or eps) >= eps  # it can reach eps
    ]
    default = "pgd-100" if norm is Linf else "pgd-100-l2"
    return with_change(max(plain, default=(0, 0, default))[-1], "eps", show(eps))


def weaker_beats_stronger(evidence: Evidence) -> CheckResult:
    """Check whether an attack breaks fewer images than one that must be weaker."""
    readable = [parsed for parsed in evidence.records if parsed.attack is not None]
    compared, flags = False, list[Flag]()
    for one, other in permutations(readable, 2):
        assert one.attack is not None and other.attack is not None
        rejectors = _comparable_rejectors(one.attack, other, evidence)
        by_error = other.attack.seeks_misclassification and weaker(one.attack, other.attack)
        compared |= not isinstance(one.attack, Clean) and (by_error or bool(rejectors))
        flags += _more_errors(one, other, [""] if by_error else [], evidence)
        flags += _more_errors(one, other, rejectors, evidence)
    if compared or flags:
        return CheckResult(BEATEN, tuple(flags))
    plain = (one.record for one in readable if isinstance(one.attack, PGD))
    named = next((record.label for record in plain if is_named_attack(record)), "")
    needed = with_change(named, "restarts", "10") if named else "pgd-100"
    return CheckResult(BEATEN, (), "two attacks of which one must be weaker", needed)


def _comparable_rejectors(one: Attack, other: ParsedRecord, evidence: Evidence) -> list[str]:
    """Rejectors for which `one` should cause no more accepted errors than `other`."""
    stronger = other.attack
    if stronger is None or isinstance(stronger, Clean):
        return []
    if targeted_rules(stronger):
        return evidence.targeted(other) if weaker_against(one, stronger) else []
    # keep="success" stops at the first error, which has a low confidence
    same_keep = one.keep_rule == stronger.keep_rule
    if stronger.seeks_misclassification and same_keep and smaller_budget(one, stronger):
        return list(evidence.evaluation.thresholds)
    return []


def _more_errors(
    one: ParsedRecord, other: ParsedRecord, rejectors: Sequence[str], evidence: Evidence
) -> list[Flag]:
    """At most one flag: the weaker attack causes more accepted errors; "" accepts all images."""
    ours, theirs = common_images(one, other)
    found = list[tuple[str, BoolArray, BoolArray]]()
    for name in rejectors:
        first, second = evidence.accepted_errors(name, one), evidence.accepted_errors(name, other)
        if first is not None and second is not None:
            found.append((name, first[:, ours], second[:, theirs]))
    if (most := most_significant(found)) is None:
        return []
    p, name, first, second, also = most
    n, case = len(ours), name and f" for {name}"
    does, more = f"leaves {share(~first)} of {n} images correct", share(~second)
    if name:
        does = f"causes accepted errors of {name} on {mean_count(first)} of {n} images"
        more = f"on {mean_count(second)}"
    return [Flag(
        BEATEN, (one.name, other.name),
        f"{one.name} {does}, but {other.name}, which should be stronger, {more}: "
        f"{mean_count(first & ~second)} by the weaker only, {mean_count(second & ~first)} by the "
        f"stronger only (p = {p:.1g}){also}.",
        f"Do not call {other.name} the worst case{case}: count an image as broken if either attack "
        "breaks it, then use an objective that does not saturate (with eta: tune it), smaller "
        "steps, more of them and more restarts.",
    )]  # fmt: skip


def weaker(one: Attack, other: Attack) -> bool:
    """Whether `one` should break no more images than `other`; only undisputed pairs are ordered."""
    if isinstance(other, Clean) or isinstance(one, Clean):
        return not isinstance(other, Clean)
    if ball_of(one) != ball_of(other):
        return False
    if smaller_budget(one, other):
        return True
    parts, enough = other.parts, one.gradient_queries <= other.gradient_queries
    by_part = any(not_larger(one, part) for part in parts)
    return by_part or (bool(parts) and is_plain(one) and enough)


def smaller_budget(one: Attack, other: Attack) -> bool:
    """Whether both are the same attack and `one` has a smaller budget."""
    return not_larger(one, other) and not not_larger(other, one)


def not_larger(one: Any, other: Any) -> bool:
    """Whether both are the same attack except for seeds, and no budget of `one` is larger."""
    if type(one) is not type(other) or not isinstance(one, Attack):
        return bool(one == other)
    for f in fields(one):
        ours, theirs = getattr(one, f.name), getattr(other, f.name)
        if f.name in one.budget_fields:
            if theirs is not None and (ours is None or ours > theirs):  # None has no limit
                return False
        elif f.name == "keep":
            if (ours, theirs) == ("success", "max_objective"):
                return False
        elif f.name != "seed" and not not_larger(ours, theirs):
            return False
    return True


def weaker_against(one: Attack, other: Attack) -> bool:
    """Whether `one` should cause no more accepted errors of the rejector that `other` targets."""
    if isinstance(one, Clean):
        return True
    if ball_of(one) != ball_of(other):
        return False
    enough = one.gradient_queries <= other.gradient_queries
    return smaller_budget(one, other) or (is_plain(one) and enough)


def is_plain(attack: Attack) -> bool:
    """Whether an attack is PGD on the cross-entropy, or on its mean over passes."""
    parts = (CE(), Misclassified())
    return isinstance(attack, PGD | EOTPGD) and (attack.objective, attack.criterion) == parts


def paired_p_value(first: BoolArray, second: BoolArray) -> float:
    """One-sided p that `first` holds more often than `second`, P, N each, as `p_above` has it."""
    if len(first) == 1:  # McNemar's exact test
        return p_above(first[first != second][None], 0.5)
    return p_above(first - second.astype(np.float64), 0)


def most_significant(
    found: Sequence[tuple[str, BoolArray, BoolArray]],
) -> tuple[float, str, BoolArray, BoolArray, str] | None:
    """Of rejectors with two answers for each image, that whose first one holds more often.

    Returns p, the rejector with its answers, and words about other significant ones; or None.
    """
    tested = [(paired_p_value(a, b), name, a, b) for name, a, b in found]
    tested = [one for one in tested if one[0] < SIGNIFICANCE / len(found)]
    if not tested:
        return None
    ranked = sorted(tested, key=lambda one: (one[0], -float(one[2].mean()), one[1]))
    (p, name, first, second), *others = ranked
    also = f"; the same with {joined_names([one[1] for one in others])}" if others else ""
    return p, name, first, second, also


def is_named_attack(record: Record) -> bool:
    """Whether the label of a record is a named attack, with or without changes."""
    return record.label.partition(":")[0] in NAMED_ATTACKS


def with_change(label: str, key: str, value: str) -> str:
    """Label of a named attack with one more change, as the command takes it."""
    name, _, changes = label.partition(":")
    others = [c for c in changes.split(",") if c and not re.match(rf"(\w+\.)?{key}=", c)]
    return f"{name}:{','.join([*others, f'{key}={value}'])}"
