"""Which attack is plainly weaker than which, and what each of them is after.

    weaker(PGD(ball, steps=10), PGD(ball, steps=100))     # the same with less
    after(PGD(ball, objective=Evasion(RCon())))                  # to be wrong and trusted by R-Con

Only orders that nobody doubts: anything else is no contradiction, whichever does better.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from demur.attacks import (
    CE,
    DLR,
    GAMA,
    PGD,
    AcceptedError,
    Attack,
    Chain,
    Clean,
    Ensemble,
    Evasion,
    LogitMargin,
    Misclassified,
    MultiTarget,
    TargetedConfidence,
    TargetedDLR,
    TargetedMargin,
    WrongConfidence,
)
from demur.balls import Ball
from demur.spec import Spec

BUDGETS = ("steps", "restarts", "queries", "searches", "targets", "eot_iter")  # more is stronger
TO_BE_WRONG = (
    CE,
    LogitMargin,
    DLR,
    WrongConfidence,
    TargetedMargin,
    TargetedDLR,
    TargetedConfidence,
    GAMA,
)


def weaker(one: Attack, other: Attack) -> bool:
    """Whether one attack should break no more images than the other."""
    if isinstance(other, Clean) or isinstance(one, Clean):
        return not isinstance(other, Clean)
    if ball_of(one) != ball_of(other):
        return False
    if smaller_budget(one, other):
        return True
    parts = members(other)
    enough = effort(one) <= effort(other)
    return any(not_larger(one, part) for part in parts) or (
        bool(parts) and is_plain(one) and enough
    )


def smaller_budget(one: Attack, other: Attack) -> bool:
    """Whether both are the same attack, and the first has less to spend."""
    return not_larger(one, other) and not not_larger(other, one)


def not_larger(one: Any, other: Any) -> bool:
    """Whether both are the same but for seeds, and nothing of the first is larger."""
    if type(one) is not type(other) or not isinstance(one, Attack):
        return bool(one == other)
    for f in fields(one):
        ours, theirs = getattr(one, f.name), getattr(other, f.name)
        if f.name in BUDGETS:
            if _amount(ours) > _amount(theirs):
                return False
        elif f.name == "keep":
            if (ours, theirs) == ("success", "max_objective"):
                return False
        elif f.name != "seed" and not not_larger(ours, theirs):
            return False
    return True


def weaker_against(one: Attack, other: Attack) -> bool:
    """Whether one attack should get no more past the rejector that the other is made against."""
    if isinstance(one, Clean):
        return True
    if ball_of(one) != ball_of(other):
        return False
    return smaller_budget(one, other) or (is_plain(one) and effort(one) <= effort(other))


def after(attack: Attack) -> list[AcceptedError | Evasion]:
    """The parts of an attack that say which rejector it wants to be wrong and accepted by."""
    return [part for part in sub_specs(attack) if isinstance(part, AcceptedError | Evasion)]


def wants_wrong(attack: Attack) -> bool:
    """Whether all that an attack is after is a wrong answer."""
    if isinstance(attack, Clean) or not isinstance(
        getattr(attack, "criterion", Misclassified()), Misclassified
    ):
        return False
    objective = getattr(attack, "objective", None)
    own = objective is None or isinstance(objective, TO_BE_WRONG)
    return own and all(wants_wrong(part) for part in members(attack))


def is_plain(attack: Attack) -> bool:
    """Whether it is PGD on the cross-entropy."""
    return (
        isinstance(attack, PGD) and attack.objective == CE() and attack.criterion == Misclassified()
    )


def members(attack: Attack) -> tuple[Attack, ...]:
    """The attacks that one consists of, if it does."""
    if isinstance(attack, MultiTarget):
        return (attack.attack,)
    chain = attack.chain() if isinstance(attack, Ensemble) else attack
    return chain.attacks if isinstance(chain, Chain) else ()


def effort(attack: Attack) -> float:
    """How many gradients it takes of an image; of all targets at least one is counted."""
    if parts := members(attack):
        times = attack.targets or 1 if isinstance(attack, MultiTarget) else 1
        return times * sum(effort(part) for part in parts)
    return float(getattr(attack, "steps", 0) * getattr(attack, "restarts", 1))


def ball_of(attack: Attack) -> Ball | None:
    """The one ball in which an attack stays; None where it has none or several."""
    parts = list(sub_specs(attack))
    roams = any(getattr(part, "any_distance", False) for part in parts)
    balls = {part for part in parts if isinstance(part, Ball)}
    return balls.pop() if len(balls) == 1 and not roams else None


def without_radius(spec: Any) -> Any:
    """A spec without its radius, step length and seed: what a sweep over eps has in common."""
    if isinstance(spec, tuple):
        return tuple(without_radius(part) for part in spec)
    if not isinstance(spec, Spec):
        return spec
    plain = {"eps": 1.0, "step": None, "seed": 0}
    kept = {f.name: plain.get(f.name, without_radius(getattr(spec, f.name))) for f in fields(spec)}
    return replace(spec, **kept)


def sub_specs(spec: Any) -> Iterator[Any]:
    """A spec and all that it is made of."""
    if isinstance(spec, tuple):
        for part in spec:
            yield from sub_specs(part)
    elif isinstance(spec, Spec):
        yield spec
        for f in fields(spec):
            yield from sub_specs(getattr(spec, f.name))


def _amount(budget: int | None) -> float:
    return math.inf if budget is None else budget
