"""The norms of the perturbations in a record against the radius of its attack."""

import re
from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from demur.attacks.balls import L2, ROUNDING, Ball, Linf
from demur.errors import BadInput
from demur.recipes import VOCABULARY
from demur.spec import read

BALL = re.compile(r"\b(?:Linf|L2)\(eps=[^()]{1,40}\)")  # in the full text of an attack
LEAVES_BALL = re.compile(r"any_distance=True|\bClean\(")  # in a part of the attack


def check_norms(arrays: Mapping[str, Tensor], attack: str) -> None:
    """Raise BadInput if a perturbation is larger than the one ball in the text of its attack.

    Parsing the whole text takes longer than reading a small record; `demur verify` does it.
    """
    balls = set(BALL.findall(attack))
    if len(balls) == 1 and not LEAVES_BALL.search(attack):
        ball = _ball(balls.pop())
        if ball is not None and (problem := norm_problem(arrays, ball)):
            raise BadInput(problem)


@lru_cache(maxsize=256)
def _ball(text: str) -> Ball | None:
    try:
        ball = read(text, VOCABULARY)
    except BadInput:
        return None
    return ball if isinstance(ball, Ball) else None


def norm_problem(arrays: Mapping[str, Tensor], ball: Ball) -> str:
    """Say which stored norm exceeds the radius of a ball, up to rounding; empty if none does."""
    name = {Linf: "size_linf", L2: "size_l2"}.get(type(ball), "")
    largest = float(arrays[name].max()) if name in arrays else 0.0
    if largest <= ball.eps + ROUNDING * (1 + ball.eps):
        return ""
    return f"{name} is {largest:.6g} in an attack of radius {ball.eps:.6g}"
