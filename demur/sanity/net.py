"""Sanity checks of scores and of the net: ties, answers at random, gradients that are zero."""

from collections.abc import Callable

import numpy as np

from demur.sanity.evidence import TOLERATED, CheckResult, Evidence, Flag, listed, too_many

TIED = "scores are tied"
RANDOM = "answers are random"
FLAT = "gradients are zero"
NO_PROBE = "a record made since nets are probed; any new attack brings one"


def tied_scores(evidence: Evidence) -> CheckResult:
    """Whether many images share one score, so that no threshold can part them."""
    found = {name: _ties(name, evidence) for name in evidence.scoring.scores}
    ties = {name: tied for name, tied in found.items() if tied}
    if not ties:
        return CheckResult(TIED)
    told = "; ".join(max(tied)[1] for tied in ties.values())
    where = tuple(dict.fromkeys(label for tied in ties.values() for *_, label in tied))
    flag = Flag(
        TIED, where,
        f"More than {TOLERATED:.0%} of the images share one score: {told}.",
        "A threshold takes all of them or none and their order is arbitrary: take a score that "
        "does not saturate (Energy, MaxLogit), or keep its logarithm.",
    )  # fmt: skip
    return CheckResult(TIED, (flag,))


def _ties(name: str, evidence: Evidence) -> list[tuple[float, str, str]]:
    """The share that is tied in each record where it is large, the same in words, the label."""
    found = []
    for each in evidence.seen:
        values = evidence.values(name, each)
        if values is None or not np.isfinite(values).any():
            continue
        # a gate gives -inf to all that it refuses, and means it
        level, counts = np.unique(values[np.isfinite(values)], return_counts=True)
        most = int(counts.argmax())
        if too_many(int(counts[most]), len(values)):
            part = float(counts[most] / len(values))
            at = evidence.scoring.thresholds.get(name) == level[most]
            words = f"{name} is {'its threshold, ' if at else ''}exactly {level[most]:.6g} on "
            found.append((part, f"{words}{100 * part:.1f}% under {each.name}", each.name))
    return found


def random_answers(evidence: Evidence) -> CheckResult:
    """Whether the net answered the same images otherwise when asked again."""
    return _probed(
        evidence, RANDOM, "random_outputs", lambda odd, of: odd > 0,
        "Asked twice about the same {of} clean images, the net answered otherwise on {odd} of them",
        "Average the gradient over several looks (APGD with looks=20) and report the mean over "
        "several verdicts: a single one is a draw.",
    )  # fmt: skip


def zero_gradients(evidence: Evidence) -> CheckResult:
    """Whether cross-entropy has no gradient at clean images."""
    return _probed(
        evidence, FLAT, "zero_gradients", too_many,
        "The gradient of the cross-entropy is exactly zero at {odd} of {of} clean images",
        "An attack by this gradient stands still, and what it leaves right is no robustness: climb "
        "a goal of logits (DLR, Margin), or attack without gradients (Square).",
    )  # fmt: skip


def _probed(
    evidence: Evidence,
    kind: str,
    entry: str,
    odd: Callable[[int, int], bool],
    seen: str,
    remedy: str,
) -> CheckResult:
    """A check of what was probed when each record was made; old records know nothing of it."""
    probes = {
        each.name: each.record.metadata["probe"]
        for each in evidence.seen
        if "probe" in each.record.metadata
    }
    if not probes:
        return CheckResult(kind, lacks=NO_PROBE)
    names = tuple(name for name, each in probes.items() if odd(each[entry], each["images"]))
    if not names:
        return CheckResult(kind)
    worst = max((probes[name] for name in names), key=lambda each: int(each[entry]))
    told = seen.format(odd=worst[entry], of=worst["images"])
    return CheckResult(kind, (Flag(kind, names, f"{told} (seen with {listed(names)}).", remedy),))
