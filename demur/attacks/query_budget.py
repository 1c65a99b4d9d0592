"""What attacks cost in gradient queries, and those of an ensemble that fit into a budget."""

from dataclasses import replace

from demur.attacks.attack import Attack
from demur.attacks.margins import MaxMinMargin, OrthogonalAPGD
from demur.errors import BadInput

PASSES_PER_GRADIENT = 3  # forward passes that take about as long as a gradient query


def cost(attack: Attack) -> float:
    """Return the gradient queries of each image at most; three forward passes count as one."""
    if len(attack.parts) == 1:  # a MultiTarget
        own = vars(attack)
        return cost(attack.parts[0]) * float((own.get("targets") or 1) * own.get("restarts", 1))
    margins = 2 if isinstance(attack, MaxMinMargin | OrthogonalAPGD) else 1  # of a single score
    return margins * attack.gradient_queries + attack.forward_queries / PASSES_PER_GRADIENT


def within(members: dict[str, Attack], most: int | None) -> dict[str, Attack]:
    """Return the attacks that fit into a number of gradient queries, with fewer targets or passes.

    Raises BadInput if none fits.
    """
    if most is None:
        return members
    found, left = dict[str, Attack](), float(most)
    for name, attack in members.items():
        share = min(1.0, left / cost(attack))
        fewer = {
            field: int(share * (vars(attack).get(field) or 0)) for field in ("targets", "queries")
        }
        fitting = replace(attack, **{field: value for field, value in fewer.items() if value})
        if cost(fitting) <= left:
            found[name] = fitting
            left -= cost(fitting)
    if not found:
        least = min(map(cost, members.values()))
        raise BadInput(f"no attack needs as few as {most} queries; give at least {least:.0f}")
    return found
