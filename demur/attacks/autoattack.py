"""AutoAttackEnsemble: four attacks without a parameter to choose (Croce and Hein 2020).

    AutoAttackEnsemble(Linf(8/255))                       # standard, as RobustBench reports it
    AutoAttackEnsemble(L2(0.5), version="plus")
    AutoAttackEnsemble(Linf(8/255), version="older")      # before August 2020, what the paper describes

An image that no attack breaks is returned as it came, so a set attacked like this mixes clean and
attacked images: rankings and TPR-95 on it are artefacts.
"""

from dataclasses import dataclass
from typing import Literal

from demur.attacks.apgd import APGD
from demur.attacks.attack import Attack
from demur.attacks.chain import Chain, Ensemble
from demur.attacks.fab import FAB
from demur.attacks.multi_target import MultiTarget
from demur.attacks.objectives import CE, DLR, TargetedDLR
from demur.attacks.square import Square
from demur.balls import Ball
from demur.errors import BadInput, suggestion
from demur.field_types import NonNegativeInt, PositiveInt

Version = Literal["standard", "plus", "rand", "older"]
VERSIONS: dict[Version, tuple[tuple[str, int], ...]] = {  # each member with its restarts
    "standard": (("apgd-ce", 1), ("apgd-t", 1), ("fab-t", 1), ("square", 1)),
    "plus": (
        ("apgd-ce", 5), ("apgd-dlr", 5), ("fab", 5), ("square", 1), ("apgd-t", 1), ("fab-t", 1),
    ),
    "rand": (("apgd-ce", 1), ("apgd-dlr", 1)),
    "older": (("apgd-ce", 5), ("apgd-dlr", 5), ("fab", 5), ("square", 1)),
}  # fmt: skip
MEMBERS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
EOT_ITER = 20


@dataclass(frozen=True)
class AutoAttackEnsemble(Ensemble):
    """The members of a version in turn, each on what the ones before it left whole.

    `targets` are the most promising wrong classes; a net of few classes has fewer.
    """

    ball: Ball
    version: Version = "standard"
    targets: PositiveInt = 9
    seed: NonNegativeInt = 0

    def chain(self) -> Chain:
        """The version spelt out."""
        members = (self.member(name, restarts) for name, restarts in VERSIONS[self.version])
        return Chain(tuple(members))

    def member(self, name: str, restarts: int = 1) -> Attack:
        """One of the attacks by the name that AutoAttack's users know."""
        ball, seed = self.ball, self.seed
        eot_iter = EOT_ITER if self.version == "rand" else 1
        match name:
            case "apgd-ce":
                return APGD(ball, restarts=restarts, objective=CE(), eot_iter=eot_iter, seed=seed)
            case "apgd-dlr":
                return APGD(ball, restarts=restarts, objective=DLR(), eot_iter=eot_iter, seed=seed)
            case "apgd-t":
                return self._at_each(
                    APGD(ball, restarts=restarts, objective=TargetedDLR(), seed=seed)
                )
            case "fab":
                return FAB(ball, restarts=restarts, seed=seed)
            case "fab-t":
                return self._at_each(FAB(ball, restarts=restarts, seed=seed))
            case "square":
                return Square(ball, seed=seed)
        raise BadInput(f"AutoAttack has no {name!r}; {suggestion(name, MEMBERS)}")

    def _at_each(self, attack: Attack) -> MultiTarget:
        return MultiTarget(attack, targets=self.targets, keep="success")
