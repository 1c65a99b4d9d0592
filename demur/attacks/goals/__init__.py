"""What an attacker raises, one value per image; goals add and scale.

CE()                                    # the usual: make the true label improbable
Evade(RCon(), eta=10)                   # be wrong and be trusted: CE + 10 log R-Con
Margin() + 0.5 * Evade(Energy())        # any sum
"""

from demur.attacks.goals.abstaining import Form, RejectionHinge, Unsafe, UnsafeMargin
from demur.attacks.goals.goal import Goal, Kept, Moment, Scaled, Sum
from demur.attacks.goals.passing import Doubt, Least, One, Product
from demur.attacks.goals.rejecting import Evade, Raise, RRLoss, Xi
from demur.attacks.goals.relaxed import KL, Relaxed, divergence
from demur.attacks.goals.targeted import Toward, TowardCon, TowardDLR
from demur.attacks.goals.untargeted import CE, DLR, Margin, WrongCon

GOALS: tuple[type[Goal], ...] = (
    CE, Margin, DLR, WrongCon, Toward, TowardDLR, TowardCon, Evade, Raise, RRLoss, Xi, Relaxed, KL,
    Least, One, Product, Doubt, Unsafe, UnsafeMargin, RejectionHinge, Sum, Scaled,
)  # fmt: skip

__all__ = [
    "CE", "DLR", "GOALS", "KL", "Doubt", "Evade", "Form", "Goal", "Kept", "Least", "Margin",
    "Moment", "One", "Product", "RRLoss", "Raise", "RejectionHinge", "Relaxed", "Scaled", "Sum",
    "Toward", "TowardCon", "TowardDLR", "Unsafe", "UnsafeMargin", "WrongCon", "Xi", "divergence",
]  # fmt: skip
