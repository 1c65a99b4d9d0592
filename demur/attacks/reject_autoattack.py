"""An ensemble made for a model that may refuse, and one that makes it refuse.

    RejectAutoAttackEnsemble(Linf(8/255), AcceptedError(RCon(), TPR(0.95)))       # wrong and accepted
    ForceRejection(Linf(8/255), Rejected(RCon(), TPR(0.95)))      # no answer at all

There is nothing to choose but the ball and the rule, which may be one score or a coupled pair.
AutoAttack leaves an image once it is wrong, refused or not, and never tries one that is wrong from
the start; here only what is wrong *and accepted* counts, and everything else is tried.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack
from demur.attacks.chain import Chain, Ensemble
from demur.attacks.criteria import AcceptedError, Rejected
from demur.attacks.fab import FAB
from demur.attacks.maxmin import MaxMinMargin
from demur.attacks.multi_target import MultiTarget
from demur.attacks.objectives import MarginProduct, MinMargin, RejectionObjective
from demur.attacks.orthogonal import OrthogonalAPGD
from demur.attacks.square import Square
from demur.balls import Ball
from demur.field_types import NonNegativeInt, PositiveInt

RejectVersion = Literal["standard", "fast"]
FAST = ("product", "product-t", "balanced")  # what finds nearly all that is ever found


@dataclass(frozen=True)
class RejectAutoAttackEnsemble(Ensemble):
    """Attacks on margins that are positive where an image is wrong and accepted.

    fast: gradients on the product, also toward each of the nearest classes; balanced ones on the
    margins. standard: orthogonal ones too, the closest such image, and random squares.
    """

    VERSION: ClassVar[int] = 2  # fast has other members since

    ball: Ball
    rule: AcceptedError
    version: RejectVersion = "standard"
    targets: PositiveInt = 9
    seed: NonNegativeInt = 0

    def chain(self) -> Chain:
        """The ensemble spelt out."""
        return Chain(
            tuple(self.members().values()), criterion=self.rule, rank_by=MinMargin(self.rule)
        )

    def members(self) -> dict[str, Attack]:
        """Its attacks by name, in the order they are run in."""
        rule, ball, seed, least = self.rule, self.ball, self.seed, MinMargin(self.rule)
        product = APGD(ball, objective=MarginProduct(rule), criterion=rule, seed=seed)
        balanced = MaxMinMargin(ball, rule, steps=50, restarts=2, seed=seed)
        members: dict[str, Attack] = {
            "product": product,
            "product-t": self._at_each(replace(product, restarts=2)),  # most of what is left
            "balanced": balanced,
            "orthogonal": OrthogonalAPGD(ball, objective=least, criterion=rule, seed=seed),
            "closest": FAB(ball, objective=least, criterion=rule, seed=seed),
            "balanced-t": self._at_each(balanced),
            "square": Square(ball, objective=least, criterion=rule, seed=seed),
        }
        return members if self.version == "standard" else {name: members[name] for name in FAST}

    def _at_each(self, attack: Attack) -> MultiTarget:
        least = MinMargin(self.rule)
        return MultiTarget(
            attack, targets=self.targets, keep="success", rank_by=least, criterion=self.rule
        )


@dataclass(frozen=True)
class ForceRejection(Ensemble):
    """Attacks that lower the score a model answers by until it refuses."""

    ball: Ball
    rule: Rejected
    restarts: PositiveInt = 1
    seed: NonNegativeInt = 0

    def chain(self) -> Chain:
        """The attacks spelt out."""
        rule, ball, doubt = self.rule, self.ball, RejectionObjective(self.rule)
        climb = APGD(ball, restarts=self.restarts, objective=doubt, criterion=rule, seed=self.seed)
        squares = Square(ball, objective=doubt, criterion=rule, seed=self.seed)
        return Chain((climb, squares), criterion=rule, rank_by=doubt)
