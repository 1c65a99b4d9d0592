"""Sanity checks over the radius: what must hold as eps grows, and between eps and eps/2."""

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from demur.attacks import PGD
from demur.balls import Ball, Linf
from demur.metrics import BoolArray
from demur.sanity.attack_order import ball_of, is_plain, wants_wrong, without_radius
from demur.sanity.evidence import (
    SURE,
    TOLERATED,
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
    too_many,
)
from demur.spec import show

RISES = "accuracy rises with eps"
LEFT = "accuracy is left at a large eps"
TOO_GOOD = "a rejector seems too good"
GREY = 0.5  # from here on every image can be made plain grey
LARGE = 128 / 255  # the last radius of the paper's sweep


def rises_with_eps(evidence: Evidence) -> CheckResult:
    """Whether the same attack leaves more right where it may change more."""
    sweeps = [sweep for sweep in _sweeps(evidence) if len(sweep) > 1]
    if not sweeps:
        lacks = "the same attack at two radii"
        return CheckResult(RISES, lacks=lacks, wants=_with_eps(evidence, Linf, LARGE))
    flags = (_rise(*pair) for sweep in sweeps for pair in pairwise(sweep))
    return CheckResult(RISES, tuple(flag for flag in flags if flag))


def _rise(near: tuple[float, ParsedRecord], far: tuple[float, ParsedRecord]) -> Flag | None:
    (small, one), (large, other) = near, far
    ours, theirs = shared(one, other)
    before, after = one.right[ours], other.right[theirs]
    p = mcnemar_p_value(after, before)
    if p >= SURE:
        return None
    return Flag(
        RISES, (one.name, other.name),
        f"The same attack leaves {share(before)} of {len(before)} images right at "
        f"eps={show(small)} and {share(after)} at eps={show(large)} (p = {p:.1g}).",
        "The larger ball holds the smaller one, so the attack fails: give it more steps, such "
        "that steps times step length reach the border, and more restarts.",
    )  # fmt: skip


def left_at_large_eps(evidence: Evidence) -> CheckResult:
    """Whether images survive where the attacker may make every one of them grey."""
    last = [each for sweep in _sweeps(evidence) for eps, each in sweep
            if eps >= GREY and isinstance(_ball(each), Linf)]  # fmt: skip
    if not last:
        lacks = "an attack at eps of 1/2 or more"
        return CheckResult(LEFT, lacks=lacks, wants=_with_eps(evidence, Linf, LARGE))
    flags = tuple(
        Flag(
            LEFT, (each.name,),
            f"{share(each.right)} of {len(each.right)} images are still right under {each.name}, "
            f"though every image can be made plain grey there; {TOLERATED:.0%} are tolerated.",
            "Gradients are masked or the steps do not reach: look at the gradients, let steps "
            "times step length reach eps, and attack without gradients (Square).",
        )
        for each in last
        if too_many(int(each.right.sum()), len(each.right))
    )  # fmt: skip
    return CheckResult(LEFT, flags)


def too_good(evidence: Evidence) -> CheckResult:
    """Whether a rejector claims more at eps than the classifier holds at eps/2 (Tramer 2022).

    Who detects changes up to eps could classify, at any cost, under changes up to eps/2.
    """
    if not evidence.scoring.thresholds:
        return CheckResult(TOO_GOOD, lacks="a threshold; train with split=held-out")
    if evidence.clean is None:
        return CheckResult(TOO_GOOD, lacks="a record of the clean images", wants="clean")
    groups = defaultdict[tuple[type[Ball], float], list[ParsedRecord]](list)
    for each in evidence.attacked:
        if (ball := _ball(each)) is not None:
            groups[type(ball), ball.eps].append(each)
    flags, compared = list[Flag](), False
    for (norm, eps), claimed in groups.items():
        held = [each for (other, half), group in groups.items() for each in group
                if other is norm and math.isclose(half, eps / 2)]  # fmt: skip
        compared |= bool(held)
        flags += _beyond(eps, claimed, held, evidence.clean, evidence) if held else []
    if compared:
        return CheckResult(TOO_GOOD, tuple(flags))
    lacks = "an attack at half the radius of another"
    norm, eps = min(groups, key=lambda at: (at[0] is not Linf, at[1]), default=(Linf, 2 * LARGE))
    return CheckResult(TOO_GOOD, lacks=lacks, wants=_with_eps(evidence, norm, eps / 2))


def _beyond(
    eps: float,
    claimed: list[ParsedRecord],
    held: list[ParsedRecord],
    clean: ParsedRecord,
    evidence: Evidence,
) -> list[Flag]:
    """At most one flag: the rejector that claims the most too much, and who else does."""
    size = 1 + max(int(each.index.max()) for each in (clean, *claimed, *held))
    shown, right = _all_of([(each, each.right) for each in held], size)
    found = list[tuple[float, float, str, BoolArray, BoolArray]]()
    for name in evidence.scoring.thresholds:
        taken = evidence.taken(name, clean)
        slips = [
            (each, s) for each in claimed if (s := evidence.accepted_errors(name, each)) is not None
        ]
        if taken is None or not slips:
            continue
        known, start = _all_of([(clean, clean.right & taken)], size)
        tried, safe = _all_of([(each, ~accepted_errors) for each, accepted_errors in slips], size)
        images = known & tried & shown
        if not images.any():
            continue
        claim, truth = (start & safe)[images], right[images]
        found.append((mcnemar_p_value(claim, truth), -float(claim.mean()), name, claim, truth))
    beyond = sorted((f for f in found if f[0] < SURE / len(found)), key=lambda f: f[:3])
    if not beyond:
        return []
    p, _, name, claim, truth = beyond[0]
    others = [also for *_, also, _, _ in beyond[1:]]
    also = f"; the same with {listed(others)}" if others else ""
    names = [each.name for each in (*claimed, *held)]
    flag = Flag(
        TOO_GOOD, tuple(names),
        f"With {name} {share(claim)} of {len(claim)} images seem safe at eps={show(eps)}: right "
        "and accepted as they are, and never wrong and accepted under attack. A detector this good "
        "would imply a classifier as good at half the radius, but there this one gets "
        f"{share(truth)} right (p = {p:.1g}){also}.",
        f"Attack {name} itself, and harder, before believing it: objective=Evade and criterion=Slips "
        "with more steps and restarts (the attack called adaptive is a start).",
    )  # fmt: skip
    return [flag]


def _all_of(
    claims: Iterable[tuple[ParsedRecord, BoolArray]], size: int
) -> tuple[BoolArray, BoolArray]:
    """For every place of the data set whether it is shown, and whether all claims about it hold."""
    shown, holds = np.zeros(size, np.bool_), np.ones(size, np.bool_)
    for each, claim in claims:
        shown[each.index] = True
        holds[each.index] &= claim
    return shown, holds


def _sweeps(evidence: Evidence) -> list[list[tuple[float, ParsedRecord]]]:
    """Attacks that are after wrong answers, alike but for their radius: the smallest first."""
    found = defaultdict[str, dict[float, ParsedRecord]](dict)
    for each in evidence.attacked:
        ball = _ball(each)
        if each.attack is None or ball is None or not wants_wrong(each.attack):
            continue
        sweep = found[show(without_radius(each.attack))]
        if ball.eps not in sweep or len(sweep[ball.eps].index) < len(each.index):
            sweep[ball.eps] = each
    return [sorted(sweep.items(), key=lambda at: at[0]) for sweep in found.values()]


def _ball(seen: ParsedRecord) -> Ball | None:
    return None if seen.attack is None else ball_of(seen.attack)


def _with_eps(evidence: Evidence, norm: type[Ball], eps: float) -> str:
    """The longest plain attack there is, at another radius, as the command takes it."""
    plain = [
        (each.attack.steps, -each.attack.restarts, each.record.label)
        for each in evidence.attacked
        if isinstance(each.attack, PGD)
        and is_plain(each.attack)
        and isinstance(each.attack.ball, norm)
        and has_name(each.record)
        and each.attack.steps * (each.attack.step_size or eps) >= eps  # else it would not get there
    ]
    usual = "pgd-100" if norm is Linf else "pgd-100-l2"
    return changed(max(plain, default=(0, 0, usual))[-1], "eps", show(eps))
