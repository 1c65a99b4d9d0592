"""The sanity check of what attacks climb: has the goal risen on the images they returned?"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from demur.attacks import (
    APGD,
    CE,
    PGD,
    Attack,
    Chain,
    Criterion,
    Ensemble,
    Misclassified,
    MultiTarget,
    Objective,
    Square,
)
from demur.attacks.criteria import RuleCriterion
from demur.evaluate.record_scores import tcon_of
from demur.metrics import BoolArray, FloatArray
from demur.runs import Record
from demur.sanity.attack_order import after, members, wants_wrong
from demur.sanity.evidence import (
    CheckResult,
    Evidence,
    Flag,
    ParsedRecord,
    share,
    shared,
    threshold_of,
)
from demur.spec import Spec, show

STILL = "the goal did not move"
TINY = 1e-30  # a probability whose logarithm is still a number


def goal_did_not_move(evidence: Evidence) -> CheckResult:
    """Whether attacks raised what they climb, on images that were not broken to begin with."""
    climbing = [
        (each, objective) for each in evidence.attacked if (objective := _climbed(each.attack))
    ]
    if not climbing:
        return CheckResult(STILL, lacks="an attack that climbs a goal", wants="pgd-100")
    if evidence.clean is None:
        return CheckResult(STILL, lacks="a record of the clean images", wants="clean")
    flags = (_still(each, objective, evidence.clean) for each, objective in climbing)
    return CheckResult(STILL, tuple(flag for flag in flags if flag))


def _climbed(attack: Attack | None) -> Objective | None:
    """What the images that an attack returns have more of, even those that did not break."""
    if isinstance(attack, PGD | APGD | Square):
        return attack.objective
    if isinstance(attack, Ensemble):
        return _climbed(attack.chain())
    if isinstance(attack, MultiTarget | Chain) and any(map(_climbed, members(attack))):
        return attack.rank_by
    return None  # it returns unbroken images as they came


def _still(attacked: ParsedRecord, objective: Objective, clean: ParsedRecord) -> Flag | None:
    here, there = shared(attacked, clean)
    whole = ~_broken(attacked, clean)
    bound = _bound(objective, attacked.record)
    after_it, before = _value(bound, attacked.record), _value(bound, clean.record)
    if after_it is None or before is None:  # it remembers something, or has to be fitted
        objective, whole = CE(), clean.right
        after_it, before = _value(objective, attacked.record), _value(objective, clean.record)
        if after_it is None or before is None or not _to_be_wrong(attacked.attack):
            return None
    rise = _rise(after_it[here], before[there])[whole[there]]
    if len(rise) == 0 or (rise > 0).mean() >= 0.5:
        return None
    return Flag(
        STILL, (attacked.name,),
        f"{attacked.name} raised {show(objective)} on {share(rise > 0)} of the {len(rise)} images that "
        f"were not broken as they are; the median change is {_middle(rise):.3g}.",
        "Look at gradients, step length and eps: climb a goal that does not saturate (DLR, "
        "Margin), and try an attack that asks for no gradient (Square).",
    )  # fmt: skip


def _rise(after_it: FloatArray, before: FloatArray) -> FloatArray:
    """How much more there is; none where both are infinite, or where one is no number."""
    known = (after_it != before) & ~np.isnan(after_it) & ~np.isnan(before)
    return np.subtract(after_it, before, out=np.zeros_like(before), where=known)


def _middle(rise: FloatArray) -> float:
    """The median, which may be infinite."""
    lower, upper = np.sort(rise)[[(len(rise) - 1) // 2, len(rise) // 2]]
    return float(lower if np.isinf(lower) or np.isinf(upper) else (lower + upper) / 2)


def _to_be_wrong(attack: Attack | None) -> bool:
    """Whether an attack is after wrong answers, accepted or not."""
    return attack is not None and (wants_wrong(attack) or bool(after(attack)))


def _broken(attacked: ParsedRecord, clean: ParsedRecord) -> BoolArray:
    """Which clean images the attack has no need to touch."""
    criterion: Criterion = getattr(attacked.attack, "criterion", Misclassified())
    if clean.record.scores_only:
        return ~clean.right
    try:
        found: BoolArray = _bound(criterion, attacked.record)(
            clean.record.output, clean.record.y
        ).numpy()
    except TypeError:  # its rejector has to be fitted
        return ~clean.right
    return found


def _value(objective: Objective, record: Record) -> FloatArray | None:
    """The goal of every image; None where a record is not enough to tell."""
    if objective.n_inputs:
        return None
    if record.scores_only:
        return -np.log(tcon_of(record).clip(TINY)) if objective == CE() else None
    try:
        with torch.no_grad():
            found: FloatArray = objective(record.output, record.y).double().numpy()
    except TypeError:  # its rejector has to be fitted
        return None
    return found


def _bound(spec: Any, record: Record) -> Any:
    """A spec with the thresholds that the attack of a record was bound to."""
    if isinstance(spec, tuple):
        return tuple(_bound(part, record) for part in spec)
    if not isinstance(spec, Spec):
        return spec
    held = {f.name: _bound(getattr(spec, f.name), record) for f in fields(spec)}
    if isinstance(spec, RuleCriterion) and (at := threshold_of(spec, record)) is not None:
        held["threshold"] = at
    return replace(spec, **held)
