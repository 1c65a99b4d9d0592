"""A partial order of attacks by strength, and the rejectors that they target.

    weaker(PGD(ball, steps=10), PGD(ball, steps=100))     # True: the same attack with fewer steps
    targeted_rules(PGD(ball, objective=PlusLogScore(RCon())))  # [PlusLogScore(RCon())]

Only undisputed pairs are ordered; no conclusion is drawn from any other pair.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from demur.attacks import (
    CE,
    PGD,
    AcceptedError,
    Attack,
    Clean,
    Misclassified,
    PlusLogScore,
)
from demur.balls import Ball
from demur.spec import Spec


def weaker(one: Attack, other: Attack) -> bool:
    """Whether `one` should break no more images than `other`."""
    if isinstance(other, Clean) or isinstance(one, Clean):
        return not isinstance(other, Clean)
    if ball_of(one) != ball_of(other):
        return False
    if smaller_budget(one, other):
        return True
    parts = other.parts
    enough = one.gradient_queries <= other.gradient_queries
    return any(not_larger(one, part) for part in parts) or (
        bool(parts) and is_plain(one) and enough
    )


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
            if _amount(ours) > _amount(theirs):
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
    return smaller_budget(one, other) or (
        is_plain(one) and one.gradient_queries <= other.gradient_queries
    )


def targeted_rules(attack: Attack) -> list[AcceptedError | PlusLogScore]:
    """Parts of an attack that name the rejector whose accepted errors it seeks."""
    return [part for part in sub_specs(attack) if isinstance(part, AcceptedError | PlusLogScore)]


def is_plain(attack: Attack) -> bool:
    """Whether an attack is PGD on the cross-entropy."""
    return (
        isinstance(attack, PGD) and attack.objective == CE() and attack.criterion == Misclassified()
    )


def ball_of(attack: Attack) -> Ball | None:
    """The ball of an attack; None if it has none or several, or is not confined to it."""
    parts = list(sub_specs(attack))
    unconfined = any(getattr(part, "any_distance", False) for part in parts)
    balls = {part for part in parts if isinstance(part, Ball)}
    return balls.pop() if len(balls) == 1 and not unconfined else None


def without_radius(spec: Any) -> Any:
    """A spec with fixed radius, step size and seed: equal for all attacks of a sweep over eps."""
    if isinstance(spec, tuple):
        return tuple(without_radius(part) for part in spec)
    if not isinstance(spec, Spec):
        return spec
    fixed = {"eps": 1.0, "step_size": None, "seed": 0}
    values = {
        f.name: fixed.get(f.name, without_radius(getattr(spec, f.name))) for f in fields(spec)
    }
    return replace(spec, **values)


def sub_specs(spec: Any) -> Iterator[Any]:
    """Iterate over a spec and all specs inside it."""
    if isinstance(spec, tuple):
        for part in spec:
            yield from sub_specs(part)
    elif isinstance(spec, Spec):
        yield spec
        for f in fields(spec):
            yield from sub_specs(getattr(spec, f.name))


def _amount(budget: int | None) -> float:
    return math.inf if budget is None else budget
