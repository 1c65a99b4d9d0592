"""Attack ensembles for models that reject: find accepted errors, or force rejections.

    RejectAutoAttackEnsemble(Linf(8/255), AcceptedError(RCon(), TPR(0.95)))
    ForceRejectionEnsemble(Linf(8/255), Rejected(RCon(), TPR(0.95)))

AutoAttack skips an image once it is misclassified, also from the start, even if the model rejects
it. Here only a wrong and accepted prediction is a success, and every other image is attacked.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack
from demur.attacks.autoattack import EOT_ITER
from demur.attacks.chain import Chain, Ensemble, MultiTarget
from demur.attacks.criteria import AcceptedError, Rejected, RuleCriterion
from demur.attacks.fab import FAB
from demur.attacks.margins import MaxMinMargin, OrthogonalAPGD
from demur.attacks.objectives import MarginProduct, MinMargin, RejectionObjective
from demur.attacks.square import Square
from demur.balls import Ball
from demur.field_types import NonNegativeInt, PositiveInt

RejectVersion = Literal["standard", "fast", "rand"]
FAST = ("product", "product-t", "balanced")  # these find nearly all accepted errors


@dataclass(frozen=True)
class RejectAutoAttackEnsemble(Ensemble):
    """Attacks that look for wrong and accepted predictions; see `demur.RejectAutoAttack`.

    "fast" runs Auto-PGD on `MarginProduct`, untargeted and targeted, and `MaxMinMargin`.
    "standard" adds Auto-PGD with orthogonal gradients, FAB, targeted `MaxMinMargin` and Square.
    "rand", for randomised models, is Auto-PGD on `MarginProduct` and on `MinMargin`, each step with
    the mean of EOT_ITER gradients.

    Args:
        ball: Linf or L2.
        criterion: The success criterion; its rejector may be one score or a coupled pair.
        version: "standard", "fast" or "rand".
        targets: The number of wrong classes for the targeted attacks.
        seed: The seed of all random numbers.
    """

    VERSION: ClassVar[int] = 2  # version 1 had other attacks in "fast"

    ball: Ball
    criterion: AcceptedError
    version: RejectVersion = "standard"
    targets: PositiveInt = 9
    seed: NonNegativeInt = 0

    def chain(self) -> Chain:
        return Chain(
            tuple(self.members().values()),
            criterion=self.criterion,
            rank_by=MinMargin(self.criterion),
        )

    def members(self) -> dict[str, Attack]:
        """Return the attacks by name, in the order in which they run."""
        criterion, ball, seed, margin = (
            self.criterion,
            self.ball,
            self.seed,
            MinMargin(self.criterion),
        )
        product = APGD(ball, objective=MarginProduct(criterion), criterion=criterion, seed=seed)
        if self.version == "rand":
            averaged = replace(product, eot_iter=EOT_ITER)
            return {"product": averaged, "margin": replace(averaged, objective=margin)}
        balanced = MaxMinMargin(ball, criterion, steps=50, restarts=2, seed=seed)
        members: dict[str, Attack] = {
            "product": product,
            "product-t": self._multi_target(replace(product, restarts=2)),
            "balanced": balanced,
            "orthogonal": OrthogonalAPGD(ball, objective=margin, criterion=criterion, seed=seed),
            "closest": FAB(ball, objective=margin, criterion=criterion, seed=seed),
            "balanced-t": self._multi_target(balanced),
            "square": Square(ball, objective=margin, criterion=criterion, seed=seed),
        }
        return members if self.version == "standard" else {name: members[name] for name in FAST}

    def _multi_target(self, attack: Attack) -> MultiTarget:
        margin = MinMargin(self.criterion)
        return MultiTarget(
            attack, targets=self.targets, keep="success", rank_by=margin, criterion=self.criterion
        )


@dataclass(frozen=True)
class ForceRejectionEnsemble(Ensemble):
    """Auto-PGD and Square on the accept margin, until the model rejects the input.

    Args:
        ball: Linf or L2.
        criterion: The success criterion.
        restarts: The restarts of Auto-PGD.
        seed: The seed of all random numbers.
    """

    ball: Ball
    criterion: Rejected
    restarts: PositiveInt = 1
    seed: NonNegativeInt = 0

    @classmethod
    def example(cls, ball: Ball, criterion: RuleCriterion) -> Attack:
        return cls(ball, Rejected(criterion.rejector, criterion.threshold))

    def chain(self) -> Chain:
        criterion, ball, seed, objective = (
            self.criterion,
            self.ball,
            self.seed,
            RejectionObjective(self.criterion),
        )
        apgd = APGD(
            ball, restarts=self.restarts, objective=objective, criterion=criterion, seed=seed
        )
        square = Square(ball, objective=objective, criterion=criterion, seed=seed)
        return Chain((apgd, square), criterion=criterion, rank_by=objective)
