"""Adversarially robust image classifiers that may answer "don't know".

    from demur import PGD, Linf, RCon, Run

The names below load what they need when they are first used, so `import demur` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from demur.attacks import (
        APGD,
        CE,
        CW,
        FAB,
        PGD,
        AutoAttack,
        Clean,
        Evade,
        ForceRefusal,
        Margin,
        Refused,
        RejectAutoAttack,
        Slips,
        Square,
        Unanswered,
        Wrong,
    )
    from demur.balls import L2, Linf
    from demur.calibrate import TPR, Coverage, Risk, certify
    from demur.evaluate import Order, Scoring, Source, attacked, bind
    from demur.foreign import RejectClass, WithScore
    from demur.output import Output
    from demur.recipes import recipe
    from demur.rejectors import GDA, KD, LID, Con, Coupled, Energy, Given, RCon
    from demur.runs import Run

_HOMES = {
    "attacks": (
        "APGD", "CE", "CW", "FAB", "PGD", "AutoAttack", "Clean", "Evade", "ForceRefusal", "Margin",
        "Refused", "RejectAutoAttack", "Slips", "Square", "Unanswered", "Wrong",
    ),
    "balls": ("L2", "Linf"),
    "calibrate": ("TPR", "Coverage", "Risk", "certify"),
    "evaluate": ("Order", "Scoring", "Source", "attacked", "bind"),
    "foreign": ("RejectClass", "WithScore"),
    "output": ("Output",),
    "recipes": ("recipe",),
    "rejectors": ("GDA", "KD", "LID", "Con", "Coupled", "Energy", "Given", "RCon"),
    "runs": ("Run",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "APGD", "CE", "CW", "FAB", "GDA", "KD", "L2", "LID", "PGD", "TPR", "AutoAttack", "Clean", "Con",
    "Coupled", "Coverage", "Energy", "Evade", "ForceRefusal", "Given", "Linf", "Margin", "Order",
    "Output", "RCon", "Refused", "RejectAutoAttack", "RejectClass", "Risk", "Run", "Scoring",
    "Slips", "Source", "Square", "Unanswered", "WithScore", "Wrong", "attacked", "bind", "certify",
    "recipe",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"demur.{_HOME[name]}"), name)
    raise AttributeError(f"module 'demur' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
