"""AutoAttack (Croce and Hein 2020) as an attack spec; `demur.AutoAttack` is the interface to it.

    AutoAttackEnsemble(Linf(8/255))                       # "standard", as RobustBench reports it
    AutoAttackEnsemble(Linf(8/255), version="older")      # before August 2020, as in the paper

An image without success is returned unchanged. The result mixes clean images and adversarial
examples, so AUROC and TPR-95 computed on it are artefacts.
"""

from dataclasses import dataclass
from typing import Literal

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack
from demur.attacks.chain import Chain, Ensemble, MultiTarget
from demur.attacks.fab import FAB
from demur.attacks.objectives import CE, DLR, TargetedDLR
from demur.attacks.square import Square
from demur.balls import Ball
from demur.errors import BadInput, suggestion
from demur.field_types import NonNegativeInt, PositiveInt

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
