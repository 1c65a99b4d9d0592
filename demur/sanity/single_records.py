"""Checks of one record, for runs and audits: ties, randomness, zero gradients, low objectives."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from demur.attacks import CE, Objective
from demur.attacks.attack import RuleCriterion
from demur.evaluate.record_scores import tcon_of
from demur.metrics import BoolArray, FloatArray
from demur.rejectors.rule import Unresolved
from demur.runs import Record
from demur.sanity.evidence import (
    TOLERATED,
    CheckResult,
    Evidence,
    Flag,
    ParsedRecord,
    common_images,
    joined_names,
    rebuilt,
    share,
    targeted_rules,
    threshold_of,
    too_many,
)
from demur.spec import Spec, show

TIED = "scores are tied"
RANDOM = "outputs are random"
FLAT = "gradients are zero"
NO_PROBE = "a record with a probe of the net; every new attack makes one"
NOT_RISEN = "the objective did not rise"
MIN_PROBABILITY = 1e-30  # the smallest whose logarithm is taken


def tied_scores(evidence: Evidence) -> CheckResult:
    """Check whether many images share one score, so that no threshold separates them."""
    ties = [tied for name in evidence.evaluation.scores if (tied := _ties(name, evidence))]
    if not ties:
        return CheckResult(TIED)
    largest = "; ".join(max(tied)[1] for tied in ties)
    names = tuple(dict.fromkeys(label for tied in ties for *_, label in tied))
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
        # a gate assigns -inf to all images that it rejects, which is intended
        if values is None or not (finite := np.isfinite(values)).any():
            continue
        level, counts = np.unique(values[finite], return_counts=True)
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
    evidence: Evidence, kind: str, entry: str, is_unusual: Callable[[int, int], bool],
    observation: str, remedy: str,
) -> CheckResult:  # fmt: skip
    """Check an entry of the probes that were made with the records; old records have none."""
    probes = {
        parsed.name: parsed.record.metadata["probe"]
        for parsed in evidence.records
        if entry in parsed.record.metadata.get("probe", ())
    }
    if not probes:
        return CheckResult(kind, missing=NO_PROBE)
    unusual = [name for name, one in probes.items() if is_unusual(one[entry], one["images"])]
    if not unusual:
        return CheckResult(kind)
    worst = max((probes[name] for name in unusual), key=lambda probe: int(probe[entry]))
    sentence = observation.format(unusual=worst[entry], total=worst["images"])
    observed = f"{sentence} (found with {joined_names(unusual)})."
    return CheckResult(kind, (Flag(kind, tuple(unusual), observed, remedy),))


def objective_did_not_rise(evidence: Evidence) -> CheckResult:
    """Check whether attacks increased their objective on images that were not broken before."""
    maximising = [
        (parsed, objective)
        for parsed in evidence.attacked
        if parsed.attack and (objective := parsed.attack.maximised)
    ]
    if not maximising:
        return CheckResult(NOT_RISEN, (), "an attack that maximises an objective", "pgd-100")
    if evidence.clean is None:
        return CheckResult(NOT_RISEN, (), "a record of the clean images", "clean")
    flags = [flag for one in maximising for flag in _flags(*one, evidence.clean)]
    return CheckResult(NOT_RISEN, tuple(flags))


def _flags(attacked: ParsedRecord, objective: Objective, clean: ParsedRecord) -> Iterator[Flag]:
    attacked_rows, clean_rows = common_images(attacked, clean)
    unbroken = ~_broken(attacked, clean)
    bound = _with_thresholds(objective, attacked.record)
    after, before = _value(bound, attacked.record), _value(bound, clean.record)
    if after is None or before is None:  # a record is not enough: compare the cross-entropy
        objective, unbroken = CE(), clean.record.correct
        after, before = _value(objective, attacked.record), _value(objective, clean.record)
        sought = attacked.attack
        seeks_errors = sought and (sought.seeks_misclassification or targeted_rules(sought))
        if after is None or before is None or not seeks_errors:
            return
    rise = _rise(after[attacked_rows], before[clean_rows])[unbroken[clean_rows]]
    if len(rise) and (rise > 0).mean() < 0.5:
        yield Flag(
            NOT_RISEN, (attacked.name,),
            f"{attacked.name} raised {show(objective)} on {share(rise > 0)} of the {len(rise)} "
            f"images that were not broken before; the median change is {_median(rise):.3g}.",
            "Check gradients, step size and eps: use an objective that does not saturate (DLR, "
            "UntargetedMargin), and an attack without gradients (Square).",
        )  # fmt: skip


def _rise(after: FloatArray, before: FloatArray) -> FloatArray:
    """Difference of the objective (N); 0 if both values are equally infinite or one is NaN."""
    known = (after != before) & ~np.isnan(after) & ~np.isnan(before)
    return np.subtract(after, before, out=np.zeros_like(before), where=known)


def _median(rise: FloatArray) -> float:
    """Median, which may be infinite (np.median would give NaN)."""
    lower, upper = np.sort(rise)[[(len(rise) - 1) // 2, len(rise) // 2]]
    return float(lower if np.isinf(lower) or np.isinf(upper) else (lower + upper) / 2)


def _broken(attacked: ParsedRecord, clean: ParsedRecord) -> BoolArray:
    """Which clean images satisfy the criterion of the attack before it starts; N."""
    if attacked.attack is not None and not clean.record.scores_only:
        bound = _with_thresholds(attacked.attack.success_criterion, attacked.record)
        with suppress(Unresolved):
            return np.asarray(bound(clean.record.output, clean.record.y).numpy())
    return ~clean.record.correct


def _value(objective: Objective, record: Record) -> FloatArray | None:
    """Objective of every image (N); None if it cannot be computed from a record."""
    if objective.n_inputs:
        return None
    if record.scores_only:
        return -np.log(tcon_of(record).clip(MIN_PROBABILITY)) if objective == CE() else None
    try:
        with torch.no_grad():
            found: FloatArray = objective(record.output, record.y).double().numpy()
    except Unresolved:
        return None
    return found


def _with_thresholds(spec: Any, record: Record) -> Any:
    """A spec with the thresholds that the attack of a record used."""

    def change(part: Spec, values: dict[str, Any]) -> dict[str, Any]:
        at = threshold_of(part, record) if isinstance(part, RuleCriterion) else None
        return values if at is None else values | {"threshold": at}

    return rebuilt(spec, change)
