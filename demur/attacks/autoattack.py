"""AutoAttack (Croce and Hein 2020) and the ensemble for rejectors, as attack specs.

    AutoAttackEnsemble(Linf(8/255))                       # "standard", as RobustBench reports it
    AutoAttackEnsemble(Linf(8/255), version="older")      # before August 2020, as in the paper

An image without success is returned unchanged. The result mixes clean images and adversarial
examples, so AUROC and TPR-95 computed on it are artefacts.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack
from demur.attacks.balls import Ball
from demur.attacks.chain import Chain, Ensemble, MultiTarget
from demur.attacks.criteria import AcceptedError, Rejected, RuleCriterion
from demur.attacks.fab import FAB
from demur.attacks.margins import MaxMinMargin, OrthogonalAPGD
from demur.attacks.objectives import (
    CE,
    DLR,
    MarginProduct,
    MinMargin,
    RejectionObjective,
    TargetedDLR,
)
from demur.attacks.square import Square
from demur.errors import BadInput, suggestion
from demur.spec.field_types import NonNegativeInt, PositiveInt

Version = Literal["standard", "plus", "rand", "older"]
VERSIONS: dict[Version, tuple[tuple[str, int], ...]] = {  # attacks with restarts
    "standard": (("apgd-ce", 1), ("apgd-t", 1), ("fab-t", 1), ("square", 1)),
    "plus": (
        ("apgd-ce", 5), ("apgd-dlr", 5), ("fab", 5), ("square", 1), ("apgd-t", 1), ("fab-t", 1),
    ),
    "rand": (("apgd-ce", 1), ("apgd-dlr", 1)),
    "older": (("apgd-ce", 5), ("apgd-dlr", 5), ("fab", 5), ("square", 1)),
}  # fmt: skip
MEMBERS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
EOT_ITER = 20  # gradients averaged by version="rand"
RejectVersion = Literal["standard", "fast", "rand"]
FAST = ("product", "product-t", "balanced")  # these find nearly all accepted errors


@dataclass(frozen=True)
class AutoAttackEnsemble(Ensemble):
    """The attacks of an AutoAttack version in turn, each on the images without success so far.

    Args:
        ball: Linf or L2.
        version: "standard", "plus", "rand" (for randomised models) or "older".
        targets: The number of wrong classes, by decreasing logit, for the targeted attacks; at
            most the number of classes minus one.
        seed: The seed of all random numbers.
    """

    ball: Ball
    version: Version = "standard"
    targets: PositiveInt = 9
    seed: NonNegativeInt = 0

    def chain(self) -> Chain:
        members = (self.member(name, restarts) for name, restarts in VERSIONS[self.version])
        return Chain(tuple(members))

    def member(self, name: str, restarts: int = 1) -> Attack:
        """Return one attack by the name it has in the authors' code."""
        ball, seed = self.ball, self.seed
        eot_iter = EOT_ITER if self.version == "rand" else 1
        match name:
            case "apgd-ce":
                return APGD(ball, restarts=restarts, objective=CE(), eot_iter=eot_iter, seed=seed)
            case "apgd-dlr":
                return APGD(ball, restarts=restarts, objective=DLR(), eot_iter=eot_iter, seed=seed)
            case "apgd-t":
                return self._multi_target(
                    APGD(ball, restarts=restarts, objective=TargetedDLR(), seed=seed)
                )
            case "fab":
                return FAB(ball, restarts=restarts, seed=seed)
            case "fab-t":
                return self._multi_target(FAB(ball, restarts=restarts, seed=seed))
            case "square":
                return Square(ball, seed=seed)
        raise BadInput(f"AutoAttack has no attack {name!r}; {suggestion(name, MEMBERS)}")

    def _multi_target(self, attack: Attack) -> MultiTarget:
        return MultiTarget(attack, targets=self.targets, keep="success")


@dataclass(frozen=True)
class RejectAutoAttackEnsemble(Ensemble):
    """Attacks that look for wrong and accepted predictions; see `demur.RejectAutoAttack`.

    AutoAttack skips an image once it is misclassified, even if the model rejects it. Here only
    a wrong and accepted prediction is a success, and every other image is attacked.

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
