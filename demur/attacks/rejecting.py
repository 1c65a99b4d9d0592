"""An ensemble made for a model that may refuse, and one that makes it refuse.

    RejectAutoAttack(Linf(8/255), Slips(RCon(), TPR(0.95)))       # wrong and accepted
    ForceRefusal(Linf(8/255), Unanswered(RCon(), TPR(0.95)))      # no answer at all

There is nothing to choose but the ball and the rule, which may be one score or a coupled pair.
AutoAttack leaves an image once it is wrong, refused or not, and never tries one that is wrong from
the start; here only what is wrong *and accepted* counts, and everything else is tried.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack
from demur.attacks.balanced import Balanced
from demur.attacks.chain import Chain, Ensemble
from demur.attacks.criteria import Slips, Unanswered
from demur.attacks.fab import FAB
from demur.attacks.goals import Doubt, Least, Product
from demur.attacks.orthogonal import OrthogonalAPGD
from demur.attacks.square import Square
from demur.attacks.targets import EachTarget
from demur.balls import Ball
from demur.declared import Count, Natural

RejectVersion = Literal["standard", "fast"]
FAST = ("product", "product-t", "balanced")  # what finds nearly all that is ever found


@dataclass(frozen=True)
class RejectAutoAttack(Ensemble):
    """Attacks on margins that are positive where an image is wrong and accepted.

    fast: gradients on the product, also toward each of the nearest classes; balanced ones on the
    margins. standard: orthogonal ones too, the closest such image, and random squares.
    """

    VERSION: ClassVar[int] = 2  # fast has other members since

    ball: Ball
    rule: Slips
    version: RejectVersion = "standard"
    targets: Count = 9
    seed: Natural = 0

    def chain(self) -> Chain:
        """The ensemble spelt out."""
        return Chain(tuple(self.members().values()), criterion=self.rule, by=Least(self.rule))

    def members(self) -> dict[str, Attack]:
        """Its attacks by name, in the order they are run in."""
        rule, ball, seed, least = self.rule, self.ball, self.seed, Least(self.rule)
        product = APGD(ball, goal=Product(rule), criterion=rule, seed=seed)
        balanced = Balanced(ball, rule, steps=50, restarts=2, seed=seed)
        members: dict[str, Attack] = {
            "product": product,
            "product-t": self._at_each(replace(product, restarts=2)),  # most of what is left
            "balanced": balanced,
            "orthogonal": OrthogonalAPGD(ball, goal=least, criterion=rule, seed=seed),
            "closest": FAB(ball, goal=least, criterion=rule, seed=seed),
            "balanced-t": self._at_each(balanced),
            "square": Square(ball, goal=least, criterion=rule, seed=seed),
        }
        return members if self.version == "standard" else {name: members[name] for name in FAST}

    def _at_each(self, attack: Attack) -> EachTarget:
        least = Least(self.rule)
        return EachTarget(
            attack, targets=self.targets, keep="criterion", by=least, criterion=self.rule
        )


@dataclass(frozen=True)
class ForceRefusal(Ensemble):
    """Attacks that lower the score a model answers by until it refuses."""

    ball: Ball
    rule: Unanswered
    restarts: Count = 1
    seed: Natural = 0

    def chain(self) -> Chain:
        """The attacks spelt out."""
        rule, ball, doubt = self.rule, self.ball, Doubt(self.rule)
        climb = APGD(ball, restarts=self.restarts, goal=doubt, criterion=rule, seed=self.seed)
        squares = Square(ball, goal=doubt, criterion=rule, seed=self.seed)
        return Chain((climb, squares), criterion=rule, by=doubt)
