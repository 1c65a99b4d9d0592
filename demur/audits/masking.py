"""Attacks that run after a chain where a model may mask its gradients.

`flags.masking_checks` finds the signs. None of them proves anything. A sign makes the ensembles run
HopSkipJump, RayS and a surrogate.
"""

from dataclasses import replace
from typing import Any

from demur.attacks import APGD, Attack
from demur.attacks.attack import AttackBatch
from demur.attacks.attack_model import CheckedModel, Model
from demur.attacks.autoattack import NOT_BROKEN, Chain, ChainState, decision_attacks
from demur.attacks.criteria import RuleCriterion
from demur.attacks.surrogate import OutcomeMargin, SurrogateGradients, distil
from demur.audits.flags import MASKED_SHARE
from demur.errors import BadInput

COMPLETE = ("standard", "plus")  # versions after which the attacks on masking run
SURROGATE = "surrogate"  # the attack with the gradients of another net


class OnMasking:
    """The attacks that run after a chain where gradients may be masked, by name.

    All run after a complete version. SURROGATE uses the gradients of the given net, and then runs
    after every version and without signs, or of a student, which is trained on the first images
    that need it.
    """

    def __init__(
        self, chain: Chain, version: str = "", seed: int = 0, surrogate: Model | None = None
    ) -> None:
        given: Any = surrogate
        if given is not None and not callable(given):
            raise BadInput(f"surrogate must be a net from images to logits, not {given!r}")
        (self.ball,), self.criterion, self.seed = chain.attacks[0].balls(), chain.criterion, seed
        self.rule = self.criterion if isinstance(self.criterion, RuleCriterion) else None
        self.attacks = dict[str, Attack]()
        if version in COMPLETE:
            self.attacks |= decision_attacks(self.ball, self.criterion, seed)
        if version in COMPLETE or given is not None:
            objective = OutcomeMargin(self.criterion, self.rule is not None and given is None)
            self.attacks[SURROGATE] = APGD(
                self.ball, restarts=5, objective=objective, criterion=self.criterion, seed=seed
            )
        self.surrogate, self.student = surrogate, surrogate

    def batch(self, name: str, model: CheckedModel, batch: AttackBatch, bs: int) -> AttackBatch:
        """Return the batch for an attack, for SURROGATE with the gradients of the other net."""
        if name != SURROGATE:
            return batch
        if self.student is None or (self.surrogate is None and int(batch.index[0]) == 0):
            self.student = distil(model, self.criterion, self.ball, batch.x, self.seed, bs)
        return replace(batch, model=SurrogateGradients(batch.model, self.student))


def square_signs(names: list[str], chain_state: ChainState) -> list[str]:
    """Return a sentence if Square broke images that every gradient attack before it left."""
    if "square" not in names[1:]:
        return []
    count = int((chain_state.broken_by == names.index("square")).sum())
    left = count + int((chain_state.broken_by == NOT_BROKEN).sum())
    if count <= max(1, MASKED_SHARE * left):
        return []
    return [f"Square succeeded on {count} of {left} images where every gradient attack failed"]
