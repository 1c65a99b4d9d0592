"""Sanity checks of the net and its scores: tied scores, random outputs and zero gradients."""

from collections.abc import Callable

import numpy as np

from demur.sanity.evidence import TOLERATED, CheckResult, Evidence, Flag, joined_names, too_many

TIED = "scores are tied"
RANDOM = "outputs are random"
FLAT = "gradients are zero"
NO_PROBE = "a record with a probe of the net; every new attack makes one"


def tied_scores(evidence: Evidence) -> CheckResult:
    """Check whether many images share one score, so that no threshold separates them."""
    found = {name: _ties(name, evidence) for name in evidence.evaluation.scores}
    ties = {name: tied for name, tied in found.items() if tied}
    if not ties:
        return CheckResult(TIED)
    largest = "; ".join(max(tied)[1] for tied in ties.values())
    names = tuple(dict.fromkeys(label for tied in ties.values() for *_, label in tied))
    flag = Flag(
        TIED, names,
        f"More than {TOLERATED:.0%} of the images share one score: {largest}.",
        "A threshold accepts all of them or none, and their order is arbitrary: use a score that "
        "does not saturate (Energy, MaxLogit), or its logarithm.",
    )  # fmt: skip
    return CheckResult(TIED, (flag,))


def _ties(name: str, evidence: Evidence) -> list[tuple[float, str, str]]:
    """For each record with many ties: their share, a description of them, the record's name."""
    found = []
    for parsed in evidence.records:
        values = evidence.values(name, parsed)
        if values is None or not np.isfinite(values).any():
            continue
        # a gate assigns -inf to all images that it rejects, which is intended
        level, counts = np.unique(values[np.isfinite(values)], return_counts=True)
        most = int(counts.argmax())
        if too_many(int(counts[most]), len(values)):
            part = float(counts[most] / len(values))
            at = evidence.evaluation.thresholds.get(name) == level[most]
            start = f"{name} is {'its threshold, ' if at else ''}exactly {level[most]:.6g} on "
            found.append((part, f"{start}{100 * part:.1f}% under {parsed.name}", parsed.name))
    return found


def random_outputs(evidence: Evidence) -> CheckResult:
    """Check whether two forward passes on the same images gave different outputs."""
    return _check_probes(
        evidence, RANDOM, "random_outputs", lambda unusual, total: unusual > 0,
        "In two forward passes on the same {total} clean images, the outputs of {unusual} of them "
        "differ",
        "Average the gradient over several passes (APGD with eot_iter=20) and report the mean over "
        "several evaluations: a single one is random.",
    )  # fmt: skip


def zero_gradients(evidence: Evidence) -> CheckResult:
    """Check whether the gradient of the cross-entropy is zero at clean images."""
    return _check_probes(
        evidence, FLAT, "zero_gradients", too_many,
        "The gradient of the cross-entropy is exactly zero at {unusual} of {total} clean images",
        "An attack by this gradient does not move, so the accuracy under it is no robustness: use "
        "an objective of logits (DLR, UntargetedMargin), or an attack without gradients (Square).",
    )  # fmt: skip


def _check_probes(
    evidence: Evidence,
    kind: str,
    entry: str,
    is_unusual: Callable[[int, int], bool],
    observation: str,
    remedy: str,
) -> CheckResult:
    """Check an entry of the probes that were made with the records; old records have none."""
    probes = {
        parsed.name: parsed.record.metadata["probe"]
        for parsed in evidence.records
        if "probe" in parsed.record.metadata
    }
    if not probes:
        return CheckResult(kind, missing=NO_PROBE)
    names = tuple(
        name for name, probe in probes.items() if is_unusual(probe[entry], probe["images"])
    )
    if not names:
        return CheckResult(kind)
    worst = max((probes[name] for name in names), key=lambda probe: int(probe[entry]))
    sentence = observation.format(unusual=worst[entry], total=worst["images"])
    observed = f"{sentence} (found with {joined_names(names)})."
    return CheckResult(kind, (Flag(kind, names, observed, remedy),))
