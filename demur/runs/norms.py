"""The norms of the perturbations in a record against the radius of its attack."""

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from demur.attacks import Attack
from demur.attacks.balls import L2, ROUNDING, Ball, Linf
from demur.errors import BadInput
from demur.recipes import VOCABULARY
from demur.spec import read


@lru_cache(maxsize=512)
def attack_of(text: str) -> Attack:
    """The attack that a text spells; BadInput if it spells none."""
    found = read(text, VOCABULARY)
    if not isinstance(found, Attack):
        raise BadInput(f"{text[:40]!r} is not an attack")
    return found


def check_norms(arrays: Mapping[str, Tensor], attack: str) -> None:
    """Raise BadInput if a perturbation is larger than the one ball in the text of its attack."""
    try:
        balls = attack_of(attack).balls()
    except BadInput:  # of a user's own class, or of another version
        return
    if len(balls) == 1 and (problem := norm_problem(arrays, balls.pop())):
        raise BadInput(problem)


def norm_problem(arrays: Mapping[str, Tensor], ball: Ball) -> str:
    """Say which stored norm exceeds the radius of a ball, up to rounding; empty if none does."""
    name = {Linf: "size_linf", L2: "size_l2"}.get(type(ball), "")
    largest = float(arrays[name].max()) if name in arrays else 0.0
    if largest <= ball.eps + ROUNDING * (1 + ball.eps):
        return ""
    return f"{name} is {largest:.6g} in an attack of radius {ball.eps:.6g}"
